"""Value and gradient of the exact KL equal a dense fp64 definition, whole and cut over gloo ranks."""

import pytest
import torch
import torch.distributed as dist

from megarl.ops.full_kl import full_kl
from tests.parallel_utils import run_ranks

TEMPERATURE = 0.7
CASES = [  # tokens, vocabulary, its padded size, hidden size, scale of the logits, near the reference's own or not
    (7, 131, 132, 16, 1.0, False),
    (3, 131, 132, 8, 30.0, False),
    (5, 2, 8, 4, 1.0, False),  # the second rank owns padding only
    (6, 131, 132, 16, 2.0, True),  # so near that the KL is about 1e-4
]


def _inputs(case: int, dtype=torch.float64):
    tokens, vocabulary, padded, hidden_size, scale, near = CASES[case]
    draw = torch.Generator().manual_seed(case)
    hidden = torch.randn(tokens, hidden_size, generator=draw, dtype=torch.float64)
    weight = scale * torch.randn(padded, hidden_size, generator=draw, dtype=torch.float64) / hidden_size**0.5
    noise = torch.randn(tokens, padded, generator=draw, dtype=torch.float64)
    logits = hidden @ weight.T + 0.01 * noise if near else scale * noise
    upstream = torch.randn(tokens, generator=draw, dtype=torch.float64)
    # Rounded first: the definition then speaks of the same numbers.
    return [x.to(dtype).double() for x in (logits, hidden, weight, upstream)] + [vocabulary]


def definition(logits, hidden, weight, upstream, vocabulary):
    """(KL [N], gradient [N, V]) as the formula says, in fp64."""
    logits = logits.clone().requires_grad_()
    log_p = torch.log_softmax(logits[:, :vocabulary] / TEMPERATURE, -1)
    log_q = torch.log_softmax((hidden @ weight.T)[:, :vocabulary] / TEMPERATURE, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    (gradient,) = torch.autograd.grad((upstream * kl).sum(), logits)
    return kl.detach(), gradient


def _of_a_rank(dtype_name: str) -> list:
    dtype, rank, ranks = getattr(torch, dtype_name), dist.get_rank(), dist.get_world_size()
    found = []
    for case in range(len(CASES)):
        logits, hidden, weight, upstream, vocabulary = _inputs(case, dtype)
        mine = slice(rank * logits.shape[1] // ranks, (rank + 1) * logits.shape[1] // ranks)
        local = logits[:, mine].to(dtype).requires_grad_()
        kl = full_kl(local, hidden.to(dtype), weight[mine].to(dtype), dist.group.WORLD, TEMPERATURE, vocabulary)
        kl.backward(upstream.to(kl.dtype))
        found.append((kl.detach(), local.grad))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_value_and_gradient_are_the_definition_s(ranks):
    found = run_ranks(_of_a_rank, ranks, "float32")
    for case in range(len(CASES)):
        kl, gradient = definition(*_inputs(case, torch.float32))
        for rank in found:
            assert torch.equal(rank[case][0], found[0][case][0])
        error = (found[0][case][0] - kl).abs()
        assert (error <= 1e-5 * kl.abs().clamp(min=1)).all(), (case, error)
        gathered = torch.cat([rank[case][1] for rank in found], dim=1)
        assert (gathered - gradient).abs().max() <= 1e-5 * kl.max().clamp(min=1), case  # the slopes are of KL's size
        assert not gathered[:, CASES[case][1] :].any()


def test_in_fp64_it_is_exact():
    for case in range(len(CASES)):
        logits, hidden, weight, upstream, vocabulary = _inputs(case)
        own = logits.clone().requires_grad_()
        kl = full_kl(own, hidden, weight, None, TEMPERATURE, vocabulary)
        kl.backward(upstream)
        expected, gradient = definition(logits, hidden, weight, upstream, vocabulary)
        torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(own.grad, gradient, rtol=1e-10, atol=1e-13)


def test_gradcheck_and_several_chunks(monkeypatch):
    monkeypatch.setattr("megarl.ops.logprob.CHUNK_ELEMENTS", 24)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=draw, dtype=torch.float64, requires_grad=True)
    hidden, weight = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (5, 11))
    assert torch.autograd.gradcheck(lambda z: full_kl(z, hidden, weight, None, 1.3, 10), logits)


def test_of_itself_it_is_zero():
    hidden, weight = torch.randn(4, 8), torch.randn(33, 8)
    assert full_kl(hidden @ weight.T, hidden, weight).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("hidden", "weight", "temperature", "message"),
    [
        ((4, 8), (32, 8), 1.0, "must be"),
        ((3, 8), (33, 8), 1.0, "must be"),
        ((4, 7), (33, 8), 1.0, "must be"),
        ((4, 8), (33, 8), 0.0, "temperature 0.0 must be > 0"),
    ],
)
def test_what_does_not_fit_is_refused(hidden, weight, temperature, message):
    with pytest.raises(ValueError, match=message):
        full_kl(torch.zeros(4, 33), torch.zeros(hidden), torch.zeros(weight), temperature=temperature)
