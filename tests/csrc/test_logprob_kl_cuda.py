"""csrc/logprob_kl.cu: compiled by nvcc without a warning or a spill, run as C++ without a GPU, and run on one."""

from pathlib import Path

import pytest
import torch

from megarl.csrc import libraries, logprob_kl_cuda
from megarl.ops import logprob_kl as ops
from tests.csrc import cuda_build
from tests.csrc import logprob_kl_cases as cases
from tests.csrc.cuda_build import needs_nvcc
from tests.csrc.test_logprob_kl import assert_equal_to_reference


@pytest.fixture(scope="module")
def reference():
    return cases.outputs(ops.reference_local_statistics, ops.reference_backward_into)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[Path, str]:
    return cuda_build.compiled("logprob_kl", tmp_path_factory.mktemp("compiled"))


@needs_nvcc
def test_no_kernel_spills(compiled):
    cuda_build.assert_no_kernel_spills("logprob_kl", compiled[1])


@needs_nvcc
def test_memory_is_moved_16_bytes_at_a_time(compiled):
    # Two of either logits in flight, and at least one of each in the loop over what is left.
    cuda_build.assert_moves_of_16_bytes(compiled[0], loads=6, stores=3)


@needs_nvcc
def test_the_compiled_library_has_the_functions_that_are_called(compiled):
    assert cuda_build.exported(compiled[0]) == set(logprob_kl_cuda._SIGNATURES)


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    """What the kernels compute when their source is compiled as C++ and every block's threads take turns."""
    bound = cuda_build.as_cpp("logprob_kl", tmp_path_factory.mktemp("host"), logprob_kl_cuda._SIGNATURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_kl_cuda, "_launch", cuda_build.launches_of(bound))
        return cases.outputs(logprob_kl_cuda.local_statistics, logprob_kl_cuda.backward_into), variants(), bound


def variants() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """[(name, found, the reference's)]: rows that are aligned in different columns, and logits of two types."""
    logits, ref_logits, targets, columns = cases.inputs("1000 bf16")
    merged_and_upstream = cases.merged_and_upstream()

    def shifted(values: torch.Tensor, by: int) -> torch.Tensor:
        wider = torch.full((len(values), values.shape[1] + by), torch.nan, dtype=values.dtype)
        wider[:, by:] = values
        return wider[:, by:]

    nothing = torch.full_like(logits, torch.nan)
    given = {
        "the reference's rows": (nothing, logits, shifted(ref_logits, 1)),
        "the logits' rows": (nothing, shifted(logits, 3), ref_logits),
        "the gradient's rows": (shifted(nothing, 5), logits, ref_logits),
        "a reference in fp32": (nothing, logits, ref_logits.float()),
        "logits in fp32": (nothing.float(), logits.float(), ref_logits),
        "strided logits": (nothing, logits.T.contiguous().T, ref_logits.T.contiguous().T),
    }
    found = []
    for name, (out, own, others) in given.items():
        statistics = [
            f(own, others, targets, *columns)
            for f in (logprob_kl_cuda.local_statistics, ops.reference_local_statistics)
        ]
        gradients = [out.clone() if out.is_contiguous() else shifted(out, 5), torch.full_like(own, torch.nan)]
        before = own.clone()
        for into, gradient in zip((logprob_kl_cuda.backward_into, ops.reference_backward_into), gradients, strict=True):
            into(gradient, own, others, targets, *merged_and_upstream, *columns)
        torch.testing.assert_close(own, before, equal_nan=True, rtol=0, atol=0)
        found += [(f"{name}: statistics", *statistics), (f"{name}: gradient", *gradients)]
    return found


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_source_computes_the_reference(on_the_host, reference, name):
    assert_equal_to_reference(on_the_host[0], reference, name)


def test_rows_may_be_aligned_otherwise_and_types_may_differ(on_the_host):
    for name, found, expected in on_the_host[1]:
        tolerance = {"atol": 2e-5, "rtol": 2e-6} if name.endswith("statistics") else {"atol": 4e-6, "rtol": 2.0**-7}
        torch.testing.assert_close(found, expected, **tolerance, msg=lambda said, name=name: f"{name}: {said}")


def test_another_type_is_an_error_code(on_the_host):
    statistics = on_the_host[2].megarl_logprob_kl_statistics
    assert statistics(None, None, 3, None, None, 1, 1, 1, 1, 0, 1.0, 0.0, None) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_nvcc
def test_kernels_on_a_gpu_are_the_reference(compiled, reference, monkeypatch):
    bound = libraries.bind(compiled[0], logprob_kl_cuda._SIGNATURES)
    monkeypatch.setattr(logprob_kl_cuda, "library", lambda: bound)
    outputs = cases.outputs(logprob_kl_cuda.local_statistics, logprob_kl_cuda.backward_into, device="cuda")
    for name in cases.NAMES:
        assert_equal_to_reference(outputs, reference, name)
