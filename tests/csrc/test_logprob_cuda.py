"""csrc/logprob.cu: compiled by nvcc without a warning or a spill, run as C++ without a GPU, and run on one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megarl.csrc import compile, logprob_cuda
from megarl.ops import logprob as ops
from tests.csrc import logprob_cases as cases
from tests.csrc.test_logprob import CUOBJDUMP, ROOT, assert_equal_to_reference

SOURCE = ROOT / "csrc" / "logprob.cu"
TYPES = {"f": "fp32", "6__half": "fp16", "13__nv_bfloat16": "bf16"}
needs_nvcc = pytest.mark.skipif(compile.find_nvcc() is None, reason="needs nvcc, in CUDA_HOME or on PATH")


@pytest.fixture(scope="module")
def reference():
    return cases.outputs(ops.reference_local_statistics, ops.reference_backward_into)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[Path, str]:
    """(library, what ptxas said), by setup.py's own command."""
    library = tmp_path_factory.mktemp("compiled") / "liblogprob.so"
    command = compile.command(compile.find_nvcc(), SOURCE, library, compile.architectures())
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return library, done.stderr


def kernel_of(line: str) -> str:
    """ "statistics_kernel<bf16, cap>" from a mangled name."""
    name, dtype, cap = re.search(
        r"(statistics_kernel|backward_kernel)I(f|6__half|13__nv_bfloat16)Lb([01])E", line
    ).groups()
    return f"{name}<{TYPES[dtype]}{', cap' if cap == '1' else ''}>"


ALL_KERNELS = {
    f"{name}_kernel<{dtype}{cap}>"
    for name in ("statistics", "backward")
    for dtype in TYPES.values()
    for cap in ("", ", cap")
}


@needs_nvcc
def test_no_kernel_spills(compiled, record_property):
    """Two blocks of 512 threads fit into the 65,536 registers of a multiprocessor, for sm_80 and sm_90."""
    pattern = r"Compiling entry function '(\w+)' for '(sm_\w+)'(.*?)Used (\d+) registers"
    found = re.findall(pattern, compiled[1], flags=re.DOTALL)
    assert {(kernel_of(name), device) for name, device, *_ in found} == {
        (kernel, device) for kernel in ALL_KERNELS for device in ("sm_80", "sm_90")
    }
    for name, device, report, registers in found:
        record_property(f"{kernel_of(name)} {device}", f"{registers} registers")
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        assert int(registers) <= 64


@needs_nvcc
def test_memory_is_moved_16_bytes_at_a_time(compiled):
    sass = subprocess.run([CUOBJDUMP, "-sass", compiled[0]], check=True, capture_output=True, text=True).stdout
    kernels = sass.split("Function : ")[1:]
    assert len(kernels) == 2 * len(ALL_KERNELS)
    for kernel in kernels:
        name = kernel_of(kernel.splitlines()[0])
        # Four in flight, and at least one in the loop over what is left.
        assert len(re.findall(r"\bLDG\.E\.128", kernel)) >= 5, name
        assert (len(re.findall(r"\bSTG\.E\.128", kernel)) >= 5) == name.startswith("backward"), name
        assert not re.search(r"\b(LDL|STL)\b", kernel), name


@needs_nvcc
def test_the_compiled_library_has_the_functions_that_are_called(compiled, monkeypatch):
    """Loading it needs CUDA's runtime, which a CUDA build of torch brings; nm reads it without."""
    symbols = subprocess.run(["nm", "-D", "--defined-only", compiled[0]], check=True, capture_output=True, text=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert {name for name in exported if name.startswith("megarl")} == set(logprob_cuda._SIGNATURES)


def test_architectures():
    assert compile.architectures() == ["80", "90"]
    assert compile.architectures("8.6;9.0a+PTX 10.0 Hopper") == ["80", "86", "90", "90a", "100"]
    command = compile.command("nvcc", SOURCE, Path("x.so"), ["80", "90", "90a"])
    assert "-gencode=arch=compute_90,code=compute_90" in command  # PTX of an "a" runs on no other device


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    """What the kernels compute when their source is compiled as C++ and every block's threads take turns."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("host") / "liblogprob.so"
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'tests/csrc/host'}", "-x", "c++"]
    subprocess.run([*command, SOURCE, "-o", library], check=True, timeout=240)
    bound = logprob_cuda.bind(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_cuda, "_launch", lambda name, device, *a: check_launch(getattr(bound, name)(*a, None)))
        return cases.outputs(logprob_cuda.local_statistics, logprob_cuda.backward_into), unaligned(), bound


def check_launch(code: int) -> None:
    assert code == 0


def unaligned() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[(gradient, the reference's)] into rows that are aligned in other columns than the logits' rows."""
    pairs = []
    arguments = cases.inputs("1000", "bf16", "")
    logits, targets, *options = arguments.values()
    for shift in (1, 3):
        out = torch.full((len(logits), 1000 + shift), torch.nan, dtype=logits.dtype)[:, shift:]
        expected = torch.full_like(logits, torch.nan)
        rows = (targets, *cases.merged(), *cases.upstream("both"))
        logprob_cuda.backward_into(out, logits, *rows, *options)
        ops.reference_backward_into(expected, logits, *rows, *options)
        pairs.append((out, expected))
    return pairs


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_source_computes_the_reference(on_the_host, reference, name):
    assert_equal_to_reference(on_the_host[0], reference, name)


def test_gradients_may_be_aligned_otherwise(on_the_host):
    for found, expected in on_the_host[1]:
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2.0**-7)


def test_another_type_is_an_error_code(on_the_host):
    statistics = on_the_host[2].megarl_logprob_statistics
    assert statistics(None, 3, None, None, 1, 1, 1, 0, 1.0, 0.0, None) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_nvcc
def test_kernels_on_a_gpu_are_the_reference(compiled, reference, monkeypatch):
    bound = logprob_cuda.bind(compiled[0])
    monkeypatch.setattr(logprob_cuda, "library", lambda: bound)
    outputs = cases.outputs(logprob_cuda.local_statistics, logprob_cuda.backward_into, device="cuda")
    for name in cases.NAMES:
        assert_equal_to_reference(outputs, reference, name)
