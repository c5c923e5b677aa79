"""The Triton kernels against the torch reference: under the interpreter, as compiled code, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from megarl.ops import dispatch
from megarl.ops import logprob as ops
from tests.csrc import logprob_cases as cases
from tests.csrc import registers
from tests.csrc.cuda_build import ROOT

# Kernels and reference add the same fp32 numbers in another order; gradients are then rounded to the logits' type, and
# the interpreter's cast to bf16 cuts off where hardware rounds: one unit in the last place.
GRAD_TOLERANCE = {"fp32": 2e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}


@pytest.fixture(scope="module")
def reference():
    return cases.outputs(ops.reference_local_statistics, ops.reference_backward_into)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    file = tmp_path_factory.mktemp("interpreted") / "outputs.safetensors"
    subprocess.run(
        [sys.executable, "-m", "tests.csrc.logprob_cases", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=True,
        timeout=240,
    )
    return load_file(file)


def assert_equal_to_reference(outputs, reference, name):
    dtype = next(dtype for dtype in cases.DTYPES if dtype in name)
    torch.testing.assert_close(outputs[f"{name} statistics"], reference[f"{name} statistics"], atol=1e-5, rtol=1e-6)
    for which in (*cases.UPSTREAMS, "in place"):
        tolerance = GRAD_TOLERANCE[dtype]
        torch.testing.assert_close(outputs[f"{name} {which}"], reference[f"{name} {which}"], atol=2e-6, rtol=tolerance)
    assert torch.equal(outputs[f"{name} in place"], outputs[f"{name} both"])


@pytest.mark.parametrize("name", cases.NAMES)
def test_interpreted_kernels_are_the_reference(interpreted, reference, name):
    assert_equal_to_reference(interpreted, reference, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_are_the_reference(reference):
    from megarl.csrc import logprob as kernels

    outputs = cases.outputs(kernels.local_statistics, kernels.backward_into, device="cuda")
    for name in cases.NAMES:
        assert_equal_to_reference(outputs, reference, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("built", [True, False], ids=["compiled", "Triton"])
def test_the_public_op_reaches_the_kernels(monkeypatch, built):
    from megarl.csrc import logprob, logprob_cuda, logprob_kl_cuda

    if not built:
        monkeypatch.setattr(logprob_cuda, "library", lambda: None)
    elif None in (logprob_cuda.library(), logprob_kl_cuda.library()):
        pytest.skip("csrc/*.cu are not compiled")
    dispatch._found.cache_clear()
    kernels, calls = logprob_cuda if built else logprob, []
    for name in ("local_statistics", "backward_into"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    logits = torch.randn(3, 17, device="cuda", requires_grad=True)
    logprob, entropy = ops.logprob_and_entropy(logits, torch.tensor([0, 5, 16], device="cuda"))
    (logprob + entropy).sum().backward()
    dispatch._found.cache_clear()
    assert calls == ["local_statistics", "backward_into"]


@pytest.mark.parametrize("pointer", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_for_hopper_and_do_not_spill(pointer, tmp_path, monkeypatch):
    """Down to the machine code of sm_90, which needs no GPU; registers and spills as ptxas reports them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton

    from megarl.csrc import logprob as kernels

    counts = {"row_stride": "i32", "num_valid": "i32", "first": "i32", "scale": "fp32", "soft_cap": "fp32"}
    statistics = dict(logits=pointer, targets="*i64", statistics="*fp32", num_tokens="i32", **counts)
    rows = dict.fromkeys(("maximum", "log_sum", "entropy", "grad_logprob", "grad_entropy"), "*fp32")
    backward = dict(out=pointer, logits=pointer, targets="*i64", **rows, out_stride="i32", width="i32", **counts)
    backward["inverse_temperature"] = "fp32"
    everything = {"HAS_GRAD_LOGPROB": True, "HAS_GRAD_ENTROPY": True, "HAS_CAP": True}
    found = {
        f"{kernel.__name__} {pointer[1:]}": registers.of_triton(kernel, types, constants, tmp_path)
        for kernel, types, constants in [
            (kernels.statistics_kernel, statistics, {"BLOCK": 8192, "HAS_CAP": True}),
            (kernels.backward_kernel, backward, {"BLOCK": 4096, **everything}),
        ]
    }
    assert all(counts["spilled_bytes"] == 0 for counts in found.values()), found
    registers.assert_recorded("logprob.py", f"triton {triton.__version__}, sm_90", found)


@pytest.mark.parametrize("triton", ["installed", "missing"])
def test_the_cpu_needs_no_triton(triton):
    """torch may import Triton for itself where it is installed; the op must neither load its kernels nor need it."""
    code = (
        "import sys, torch\n"
        f"if {triton == 'missing'}: sys.modules['triton'] = None\n"
        "from megarl.ops.logprob import logprob_and_entropy as op\n"
        "z = torch.randn(2, 5, requires_grad=True)\n"
        "sum(op(z, torch.tensor([0, 1]))).sum().backward()\n"
        "sys.exit('megarl.csrc.logprob' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
