"""csrc/logprob.cu: compiled by nvcc without a warning or a spill, run as C++ without a GPU, and run on one."""

from pathlib import Path

import pytest
import torch

from megarl.csrc import compile, libraries, logprob_cuda
from megarl.ops import logprob as ops
from tests.csrc import cuda_build
from tests.csrc import logprob_cases as cases
from tests.csrc.cuda_build import needs_nvcc
from tests.csrc.test_logprob import assert_equal_to_reference


@pytest.fixture(scope="module")
def reference():
    return cases.outputs(ops.reference_local_statistics, ops.reference_backward_into)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[Path, str]:
    return cuda_build.compiled("logprob", tmp_path_factory.mktemp("compiled"))


@needs_nvcc
def test_no_kernel_spills(compiled):
    cuda_build.assert_no_kernel_spills("logprob", compiled[1])


@needs_nvcc
def test_memory_is_moved_16_bytes_at_a_time(compiled):
    # Four in flight, and at least one in the loop over what is left.
    cuda_build.assert_moves_of_16_bytes(compiled[0], loads=5, stores=5)


@needs_nvcc
def test_the_compiled_library_has_the_functions_that_are_called(compiled):
    assert cuda_build.exported(compiled[0]) == set(logprob_cuda._SIGNATURES)


def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert libraries.load_cuda(tmp_path / "none.so", {}) is None and not caplog.records
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"not an ELF file")
    stale = cuda_build.as_cpp("logprob", tmp_path, {})._name
    for path in (broken, Path(stale)):
        assert libraries.load_cuda(path, {"megarl_of_tomorrow": []}) is None
        assert f"{path} cannot be used" in caplog.messages[-1] and "build it again" in caplog.messages[-1]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert libraries.load_cuda(broken, {}) is None and len(caplog.messages) == 2


def test_architectures():
    assert compile.architectures() == ["80", "90"]
    assert compile.architectures("8.6;9.0a+PTX 10.0 Hopper") == ["80", "86", "90", "90a", "100"]
    command = compile.command("nvcc", Path("x.cu"), Path("x.so"), ["80", "90", "90a"])
    assert "-gencode=arch=compute_90,code=compute_90" in command  # PTX of an "a" runs on no other device


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    """What the kernels compute when their source is compiled as C++ and every block's threads take turns."""
    bound = cuda_build.as_cpp("logprob", tmp_path_factory.mktemp("host"), logprob_cuda._SIGNATURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_cuda, "_launch", cuda_build.launches_of(bound))
        return cases.outputs(logprob_cuda.local_statistics, logprob_cuda.backward_into), unaligned(), bound


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
    bound = libraries.bind(compiled[0], logprob_cuda._SIGNATURES)
    monkeypatch.setattr(logprob_cuda, "library", lambda: bound)
    outputs = cases.outputs(logprob_cuda.local_statistics, logprob_cuda.backward_into, device="cuda")
    for name in cases.NAMES:
        assert_equal_to_reference(outputs, reference, name)
