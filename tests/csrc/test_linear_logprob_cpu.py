"""csrc/linear_logprob.cpp: compiled without a warning for every level of processors, and run against torch."""

import pytest
import torch

from megarl.csrc import linear_logprob_cpu
from megarl.ops import linear_logprob as ops
from tests.csrc import cpu_build

pytestmark = cpu_build.needs_cpp


@pytest.fixture(scope="module", params=cpu_build.LEVELS_AND_THREADS, ids=str)
def kernels(request, tmp_path_factory):
    level, threads = request.param
    folder, signatures = tmp_path_factory.mktemp("compiled"), linear_logprob_cpu._SIGNATURES
    library = cpu_build.compiled("linear_logprob", level, folder, signatures)
    yield from cpu_build.installed(linear_logprob_cpu, library, threads)


@pytest.mark.parametrize("hidden_size", [1, 17, 896])
@pytest.mark.parametrize("vocab", [1, 512, 513, 1400])
@pytest.mark.parametrize("in_columns", [False, True])
def test_the_weight_gradient_is_the_reference_s(kernels, hidden_size, vocab, in_columns):
    """Of odd sizes, and of tiles that end within the vocabulary and at its end; the sums go on from what is there."""
    generator = torch.Generator().manual_seed(vocab)
    grad_logits = torch.randn(9, vocab, generator=generator).bfloat16()
    hidden = torch.randn(9, hidden_size, generator=generator).bfloat16()
    found, expected = torch.randn(vocab, hidden_size, generator=generator).expand(2, -1, -1).clone()
    kernels.add_weight_gradient(found, cpu_build.columns(grad_logits) if in_columns else grad_logits, hidden)
    ops.reference_add_weight_gradient(expected, grad_logits, hidden)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2.0**-8)  # products are rounded to bf16


def test_another_type_is_an_error_code(kernels):
    assert kernels.library().megarl_linear_logprob_add_cpu(None, None, 1, 0) == 1
