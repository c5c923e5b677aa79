"""csrc/logprob_kl.cpp: compiled without a warning for every level of processors, and run against the reference."""

import pytest
import torch

from megarl.csrc import logprob_kl_cpu
from megarl.ops import logprob_kl as ops
from tests.csrc import cpu_build
from tests.csrc import logprob_kl_cases as cases
from tests.csrc.cpu_build import columns
from tests.csrc.test_logprob_kl import GRAD_TOLERANCE, assert_equal_to_reference

NAMES = [name for name in cases.NAMES if "fp16" not in name]
pytestmark = cpu_build.needs_cpp


@pytest.fixture(scope="module", params=cpu_build.LEVELS_AND_THREADS, ids=str)
def kernels(request, tmp_path_factory):
    level, threads = request.param
    library = cpu_build.compiled("logprob_kl", level, tmp_path_factory.mktemp("compiled"), logprob_kl_cpu._SIGNATURES)
    yield from cpu_build.installed(logprob_kl_cpu, library, threads)


class InColumns:
    """The kernels on copies of that layout, behind the same functions."""

    @staticmethod
    def local_statistics(logits, ref_logits, *arguments):
        return logprob_kl_cpu.local_statistics(columns(logits), columns(ref_logits), *arguments)

    @staticmethod
    def backward_into(out, logits, ref_logits, *arguments):
        of_columns = columns(logits)
        result = of_columns if out is logits else columns(out)
        logprob_kl_cpu.backward_into(result, of_columns, columns(ref_logits), *arguments)
        out.copy_(result)


LAYOUTS = pytest.mark.parametrize("functions", [logprob_kl_cpu, InColumns], ids=["rows", "columns"])


def of_two_types(functions, prefix: str = "") -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "NAMES", NAMES)
        return cases.outputs(*(getattr(functions, prefix + name) for name in ("local_statistics", "backward_into")))


@pytest.fixture(scope="module")
def reference():
    return of_two_types(ops, "reference_")


@pytest.fixture(scope="module")
def outputs(kernels):
    return {functions: of_two_types(functions) for functions in (logprob_kl_cpu, InColumns)}


@LAYOUTS
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_the_reference(outputs, reference, functions, name):
    assert_equal_to_reference(outputs[functions], reference, name)


@LAYOUTS
@pytest.mark.parametrize("num_tokens", [1, 17, 600])
@pytest.mark.parametrize("width", [1, 15, 2049])
def test_odd_sizes(kernels, functions, num_tokens, width):
    """More tokens and columns than a tile has, and fewer than a vector."""
    generator = torch.Generator().manual_seed(num_tokens * width)
    logits, ref_logits = torch.randn(2, num_tokens, width + 2, generator=generator) * 3
    logits[:, width:] = ref_logits[:, width:] = torch.nan  # padding is not read
    targets = torch.randint(-1, width, (num_tokens,), generator=generator)
    arguments = (0.8, None, 0, width)
    found = functions.local_statistics(logits, ref_logits, targets, *arguments)
    expected = ops.reference_local_statistics(logits, ref_logits, targets, *arguments)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-6)
    merged, _ = ops.merge(expected[None], targets, 0.8)
    upstream = torch.randn(3, num_tokens, generator=generator)
    gradient, of_reference = torch.full_like(logits, torch.nan), torch.full_like(logits, torch.nan)
    functions.backward_into(gradient, logits, ref_logits, targets, merged, upstream, *arguments)
    ops.reference_backward_into(of_reference, logits, ref_logits, targets, merged, upstream, *arguments)
    torch.testing.assert_close(gradient, of_reference, atol=4e-6, rtol=GRAD_TOLERANCE["fp32"])
    assert not gradient[:, width:].any() and not gradient[targets < 0].any()


@LAYOUTS
def test_what_only_the_reference_masks_has_a_huge_kl(kernels, functions):
    """And what both mask costs nothing."""
    logits, ref_logits = torch.randn(2, 4, 5000, generator=torch.Generator().manual_seed(0))
    logits[2, :3000] = ref_logits[2, :3000] = -torch.inf  # the first whole block of a row
    ref_logits[1, :3000] = -torch.inf
    targets = torch.full((4,), 4000)
    packed = functions.local_statistics(logits, ref_logits, targets, 1.0, None, 0, 5000)
    kl = ops.merge(packed[None], targets, 1.0)[1][2]
    p, q = (torch.softmax(x.double(), dim=-1) for x in (logits, ref_logits))
    exact = (p * (p.log() - q.log()).nan_to_num(0.0)).sum(dim=-1)
    assert kl[1] > 1e29
    torch.testing.assert_close(kl[[0, 2, 3]].double(), exact[[0, 2, 3]], atol=1e-5, rtol=0)


def test_logits_of_two_types_and_layouts(kernels, monkeypatch):
    logits, ref_logits, targets, arguments = cases.inputs("1000 bf16")
    merged_and_upstream = cases.merged_and_upstream()
    monkeypatch.setattr(logprob_kl_cpu, "_CHUNK_ELEMENTS", 2500)
    for own, others in [
        (logits.float(), ref_logits),
        (logits.float(), ref_logits.double()),
        (logits, ref_logits.float()),
        (logits, ref_logits.half()),
        (columns(logits), ref_logits),
        (logits, columns(ref_logits)),
        (columns(logits), columns(ref_logits.float())),
    ]:
        found = kernels.local_statistics(own, others, targets, *arguments)
        expected = ops.reference_local_statistics(own, others, targets, *arguments)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-6)
        gradients, before = torch.full((2, *own.shape), torch.nan, dtype=own.dtype), own.clone()
        for into, gradient in zip((kernels.backward_into, ops.reference_backward_into), gradients, strict=True):
            into(gradient, own, others, targets, *merged_and_upstream, *arguments)
        torch.testing.assert_close(gradients[0], gradients[1], atol=4e-6, rtol=GRAD_TOLERANCE["bf16"])
        torch.testing.assert_close(own, before, equal_nan=True, rtol=0, atol=0)


def test_another_type_is_an_error_code(kernels):
    function = kernels.library().megarl_logprob_kl_statistics_cpu
    assert function(None, 1, None, 1, 1, 0, None, None, 0, 1, 0, 1.0, 0.0, 1) == 1
