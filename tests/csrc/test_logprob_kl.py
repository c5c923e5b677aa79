"""The Triton kernels of the exact KL against the torch reference: interpreted, compiled, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.ops import logprob_kl as ops
from tests.csrc import logprob_kl_cases as cases
from tests.csrc import registers

# The interpreter's cast to bf16 cuts off where hardware rounds: one unit in the last place.
GRAD_TOLERANCE = {"fp32": 4e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    return cases.outputs(ops.reference_local_statistics, ops.reference_backward_into)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    file = tmp_path_factory.mktemp("interpreted") / "outputs.safetensors"
    subprocess.run(
        [sys.executable, "-m", "tests.csrc.logprob_kl_cases", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=True,
        timeout=240,
    )
    return load_file(file)


def assert_equal_to_reference(outputs, reference, name):
    tolerance = next(GRAD_TOLERANCE[dtype] for dtype in cases.DTYPES if dtype in name)
    torch.testing.assert_close(outputs[f"{name} statistics"], reference[f"{name} statistics"], atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(outputs[f"{name} gradient"], reference[f"{name} gradient"], atol=4e-6, rtol=tolerance)
    assert torch.equal(outputs[f"{name} in place"], outputs[f"{name} gradient"])


@pytest.mark.parametrize("name", cases.NAMES)
def test_interpreted_kernels_are_the_reference(interpreted, reference, name):
    assert_equal_to_reference(interpreted, reference, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_are_the_reference(reference):
    from megarl.csrc import logprob_kl as kernels

    outputs = cases.outputs(kernels.local_statistics, kernels.backward_into, device="cuda")
    for name in cases.NAMES:
        assert_equal_to_reference(outputs, reference, name)


@pytest.mark.parametrize("pointer", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_for_hopper_and_do_not_spill(pointer, tmp_path, monkeypatch):
    """Down to the machine code of sm_90, which needs no GPU; registers and spills as ptxas reports them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton

    from megarl.csrc import logprob_kl as kernels

    floats = dict.fromkeys(("scale", "soft_cap", "inverse_temperature"), "fp32")
    tensors = dict.fromkeys(("logits", "ref_logits", "out"), pointer) | {"targets": "*i64"}
    types = floats | tensors | dict.fromkeys(("statistics", "merged", "upstream"), "*fp32")
    constants = {"HAS_CAP": True, "BLOCK": 4096}
    found = {}
    for kernel in (kernels.statistics_kernel, kernels.backward_kernel):
        of_kernel = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
        found[f"{kernel.__name__} {pointer[1:]}"] = registers.of_triton(kernel, of_kernel, constants, tmp_path)
    assert all(counts["spilled_bytes"] == 0 for counts in found.values()), found
    registers.assert_recorded("logprob_kl.py", f"triton {triton.__version__}, sm_90", found)
