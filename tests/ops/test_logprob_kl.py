"""logprob_entropy_and_kl against fp64 definitions, its reference given either way, over ranks, and as custom ops."""

import pytest
import torch
import torch.distributed as dist

from megarl.ops import logprob_kl as ops
from tests.parallel_utils import run_ranks

pytestmark = pytest.mark.usefixtures("each_path")

# Statistics are fp32 whatever the logits are; the gradient has the logits' type.
TOLERANCE = {  # logits: (values, gradient)
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (1e-5, 8e-3),
    torch.float16: (1e-5, 1e-3),
}


def definition(logits, ref_logits, targets, temperature=1.0, vocab_size=None, soft_cap=None):
    """(log-prob, entropy, KL) [N] from the definitions, in fp64; 0 for ignored tokens."""

    def log_softmax(x):
        x = x.double()[:, :vocab_size]
        return torch.log_softmax((x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)) / temperature, -1)

    log_p, log_q = log_softmax(logits), log_softmax(ref_logits)
    logprob = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    values = (logprob, -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1))
    return tuple(value.where(targets >= 0, 0.0) for value in values)


def case(vocab, dtype=torch.float32, num_tokens=6, distance=1.0, vocab_size=None, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_tokens, vocab, generator=draw, dtype=torch.float64)
    ref_logits = (logits + distance * torch.randn(num_tokens, vocab, generator=draw, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab_size or vocab, (num_tokens,), generator=draw)
    targets[1] = -100
    return logits.to(dtype), ref_logits, targets, torch.randn(3, num_tokens, generator=draw, dtype=torch.float64)


def values_and_gradient(function, logits, ref_logits, targets, upstream, **options):
    logits = logits.detach().clone().requires_grad_()
    values = function(logits, ref_logits, targets, **options)
    sum((weight * value).sum() for weight, value in zip(upstream.to(values[0].dtype), values)).backward()
    return *(value.detach() for value in values), logits.grad


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 123, 1000])
@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, None), (0.7, None), (1.5, 4.0)])
def test_values_and_gradients_are_the_definition(dtype, vocab, temperature, soft_cap):
    inputs, options = case(vocab, dtype), {"temperature": temperature, "soft_cap": soft_cap}
    *values, grad = values_and_gradient(ops.logprob_entropy_and_kl, *inputs, **options)
    *exact, exact_grad = values_and_gradient(definition, inputs[0].double(), *inputs[1:], **options)
    value_tolerance, grad_tolerance = TOLERANCE[dtype]
    for found, expected in zip(values, exact, strict=True):
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), expected, atol=value_tolerance, rtol=0)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), exact_grad, atol=grad_tolerance, rtol=grad_tolerance)


@pytest.mark.parametrize("distance", [0.0, 1e-3, 1e-2])
def test_near_distributions_keep_their_digits(distance):
    inputs = case(1000, distance=distance)
    kl = ops.logprob_entropy_and_kl(*inputs[:3])[2]
    exact = definition(*inputs[:3])[2]
    torch.testing.assert_close(kl.double(), exact, atol=2e-6, rtol=0)


def test_gradcheck():
    logits, ref_logits, targets, _ = case(11, torch.float64, num_tokens=4, vocab_size=9)
    assert torch.autograd.gradcheck(
        lambda x: ops.logprob_entropy_and_kl(x, ref_logits, targets, None, 0.8, 9, soft_cap=2.0),
        logits.requires_grad_(),
    )


def test_chunks_padding_and_in_place(monkeypatch):
    inputs = case(40, torch.bfloat16, num_tokens=11, vocab_size=33)
    whole = values_and_gradient(ops.logprob_entropy_and_kl, *inputs, vocab_size=33)
    assert not whole[3][:, 33:].any() and not whole[3][1].any()
    monkeypatch.setattr("megarl.ops.logprob.CHUNK_ELEMENTS", 100)
    chunked = values_and_gradient(ops.logprob_entropy_and_kl, *inputs, vocab_size=33)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
    over = inputs[0].clone().requires_grad_()
    produced = over * 1.0
    values = ops.logprob_entropy_and_kl(produced, *inputs[1:3], vocab_size=33, inplace_backward=True)
    sum((weight * value).sum() for weight, value in zip(inputs[3].float(), values)).backward()
    assert torch.equal(over.grad, whole[3]) and torch.equal(produced.detach(), whole[3])


def test_extreme_and_masked_logits():
    logits, ref_logits, targets, upstream = case(123)
    logits[:, ::2], ref_logits[:, ::2] = -1e4, -1e4
    logits[2, 7], ref_logits[3, 9] = 1e4, 1e4
    logits[4, :60] = ref_logits[4, :50] = -torch.inf  # ten columns have probability under the reference only
    targets[targets >= 0] = 61
    *values, grad = values_and_gradient(ops.logprob_entropy_and_kl, logits, ref_logits, targets, upstream)
    log_p, log_q = (torch.log_softmax(x.double(), -1) for x in (logits, ref_logits))
    exact = (log_p.exp() * (log_p - log_q)).nan_to_num(0.0).sum(-1).where(targets >= 0, 0.0)
    torch.testing.assert_close(values[2].double(), exact, atol=1e-5, rtol=1e-6)
    assert grad.isfinite().all() and not grad[4, :60].any()


def test_the_inner_ops_are_well_formed():
    logits, ref_logits, targets, upstream = case(9, num_tokens=4)
    for columns in [(0.7, None, 0, 8), (0.7, 5.0, 0, 8)]:
        torch.library.opcheck(ops.local_statistics, (logits, ref_logits, targets, *columns))
        packed = ops.local_statistics(logits, ref_logits, targets, *columns)
        merged, _ = ops.merge(packed[None], targets, 0.7)
        arguments = (torch.empty_like(logits), logits, ref_logits, targets, merged, upstream.float(), *columns)
        torch.library.opcheck(ops.backward_into, arguments)


def of_hidden(dtype=torch.float32, scale=1.0, near=False, vocab=132):
    """(logits, (ref_hidden, ref_weight), targets, upstream); near: a KL of about 1e-4."""
    draw = torch.Generator().manual_seed(vocab)
    hidden, weight, noise = (
        torch.randn(n, generator=draw, dtype=torch.float64) for n in ((7, 16), (vocab, 16), (7, vocab))
    )
    weight *= scale / 4
    logits = hidden @ weight.T + 0.01 * noise if near else scale * noise
    targets = torch.randint(0, vocab - 1, (7,), generator=draw)
    targets[1] = -100
    upstream = torch.randn(3, 7, generator=draw, dtype=torch.float64)
    return logits.to(dtype), (hidden.to(dtype), weight.to(dtype)), targets, upstream


def logits_of(reference) -> torch.Tensor:
    """In fp64, of the rounded hidden states and weight."""
    return reference[0].double() @ reference[1].double().T


HIDDEN_CASES = [(1.0, False), (30.0, False), (2.0, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("scale", "near"), HIDDEN_CASES)
def test_a_reference_may_be_its_hidden_states_and_weight(monkeypatch, dtype, scale, near):
    monkeypatch.setitem(ops.CHUNK_BYTES, "cpu", 3 * 132 * dtype.itemsize)  # three tokens
    logits, reference, targets, upstream = of_hidden(dtype, scale, near)
    options = {"temperature": 0.7, "vocab_size": 131}
    found = values_and_gradient(ops.logprob_entropy_and_kl, logits, reference, targets, upstream, **options)
    exact = values_and_gradient(definition, logits.double(), logits_of(reference), targets, upstream, **options)
    assert_exact(found, exact, 1e-5 if dtype == torch.float32 else 1e-12)
    assert not found[3][:, 131:].any() and not found[3][1].any()


def assert_exact(found, exact, tolerance: float) -> None:
    for value, expected in zip(found, exact, strict=True):
        error = (value.double() - expected).abs().max()
        assert error <= tolerance * exact[2].max().clamp(min=1), error  # slopes and KL are of one size


def test_gradcheck_of_several_chunks(monkeypatch):
    monkeypatch.setitem(ops.CHUNK_BYTES, "cpu", 2 * 11 * 8)
    monkeypatch.setattr("megarl.ops.logprob.CHUNK_ELEMENTS", 12)
    logits, reference, targets, _ = of_hidden(torch.float64, vocab=11)
    assert torch.autograd.gradcheck(
        lambda x: ops.logprob_entropy_and_kl(x, reference, targets, None, 1.3, 10), logits.requires_grad_()
    )


def test_chunks_of_the_reference_do_not_show_and_may_be_in_place(monkeypatch):
    logits, reference, targets, upstream = of_hidden(torch.bfloat16)
    whole = values_and_gradient(
        ops.logprob_entropy_and_kl, logits, reference[0] @ reference[1].T, targets, upstream, vocab_size=131
    )
    monkeypatch.setitem(ops.CHUNK_BYTES, "cpu", 2 * 132 * 2)
    produced = (x := logits.clone().requires_grad_()) * 1.0
    values = ops.logprob_entropy_and_kl(produced, reference, targets, vocab_size=131, inplace_backward=True)
    sum((weight * value).sum() for weight, value in zip(upstream.float(), values)).backward()
    for found, expected in zip((*values, x.grad), whole, strict=True):
        torch.testing.assert_close(
            found.detach(), expected, atol=1e-2, rtol=1e-2
        )  # products of other shapes round otherwise
    assert torch.equal(produced.detach(), x.grad)


def test_of_itself_it_is_zero():
    hidden, weight = torch.randn(4, 8), torch.randn(33, 8)
    kl = ops.logprob_entropy_and_kl(hidden @ weight.T, (hidden, weight), torch.arange(4))[2]
    assert kl.abs().max() <= 1e-6


def zeros(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (zeros(3, 11), r"reference \(3, 11\) must be logits \(3, 12\)"),
        (None, r"reference None must be logits \(3, 12\), or a tuple"),
        (torch.zeros(3, 12, dtype=torch.int64), "the reference's logits of torch.int64 must be bfloat16"),
        ((zeros(3, 8),), "must be a tuple of hidden states and weight"),
        ((zeros(3, 8), zeros(11, 8)), r"must be \[3, K\] and \[12, K\] of one type"),
        ((zeros(2, 8), zeros(12, 8)), r"hidden states \(2, 8\)"),
        ((zeros(3, 7), zeros(12, 8)), r"weight \(12, 8\)"),
        ((zeros(3, 8), zeros(12, 8).half()), "float16 must be"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(reference, message):
    with pytest.raises(ValueError, match=message):
        ops.logprob_entropy_and_kl(torch.zeros(3, 12), reference, torch.zeros(3, dtype=torch.int64))


VOCAB_SIZES = (20, 13, 9)  # of 20 columns: the last two leave one and two of four ranks with padding alone


def _on_shards():
    """{vocab_size: (values and gradient, shapes gathered)} of this rank's columns."""
    gathered, real, results = [], dist.all_gather_into_tensor, {}

    def recorded(output, piece, group):
        gathered.append([*piece.shape])
        return real(output, piece, group=group)

    dist.all_gather_into_tensor = recorded
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for vocab_size in VOCAB_SIZES:
        logits, ref_logits, targets, upstream = case(20, vocab_size=vocab_size)
        own = [x.chunk(ranks, dim=1)[rank] for x in (logits, ref_logits)]
        options = {"group": dist.group.WORLD, "temperature": 0.7, "vocab_size": vocab_size}
        found = values_and_gradient(ops.logprob_entropy_and_kl, *own, targets, upstream, **options)
        results[vocab_size] = (found, list(gathered))
        gathered.clear()
    return results


def _of_hidden_on_shards():
    """[values and gradient] of this rank's columns, by case."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for scale, near in HIDDEN_CASES:
        logits, (ref_hidden, ref_weight), targets, upstream = of_hidden(torch.float32, scale, near)
        own = logits.chunk(ranks, dim=1)[rank], (ref_hidden, ref_weight.chunk(ranks)[rank])
        options = {"group": dist.group.WORLD, "temperature": 0.7, "vocab_size": 131}
        results.append(values_and_gradient(ops.logprob_entropy_and_kl, *own, targets, upstream, **options))
    return results


def _everything_on_shards():
    return _on_shards(), _of_hidden_on_shards()


@pytest.fixture(scope="module")
def sharded():
    return list(zip(*run_ranks(_everything_on_shards, 4), strict=True))


def test_shards_of_hidden_states_are_the_definition_s(sharded):
    found = sharded[1]
    for case_index, (scale, near) in enumerate(HIDDEN_CASES):
        logits, reference, targets, upstream = of_hidden(torch.float32, scale, near)
        inputs = (logits.double(), logits_of(reference), targets, upstream)
        exact = values_and_gradient(definition, *inputs, temperature=0.7, vocab_size=131)
        *values, _ = found[0][case_index]
        assert_exact((*values, torch.cat([of_rank[case_index][3] for of_rank in found], dim=1)), exact, 1e-5)
        for of_rank in found:
            assert all(map(torch.equal, of_rank[case_index][:3], values))


def test_shards_equal_one_rank(sharded):
    found = sharded[0]
    for vocab_size in VOCAB_SIZES:
        *whole, grad = values_and_gradient(
            ops.logprob_entropy_and_kl, *case(20, vocab_size=vocab_size), temperature=0.7, vocab_size=vocab_size
        )
        for (*values, _), gathered in (of_rank[vocab_size] for of_rank in found):
            assert gathered == [[7, 6]]
            for value, expected, first in zip(values, whole, found[0][vocab_size][0], strict=False):
                torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
                assert torch.equal(value, first)
        cut = torch.cat([of_rank[vocab_size][0][3] for of_rank in found], dim=1)
        torch.testing.assert_close(cut, grad, atol=1e-6, rtol=0)
