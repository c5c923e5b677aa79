"""logprob_and_entropy and greedy_match against fp64 definitions, over ranks, and as custom ops."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.ops import logprob as ops
from tests.parallel_utils import run_ranks

pytestmark = pytest.mark.usefixtures("each_path")

GOLDENS = Path(__file__).parents[1] / "goldens" / "entropy_logprob.npz"

# What rounding allows, relative to values of order 10: statistics are fp32 whatever the logits are, so only the
# gradient, which has the logits' type, is coarser for narrower types.
TOLERANCE = {  # logits: (values, gradient)
    torch.float64: (1e-12, 1e-12),
    torch.float32: (5e-6, 1e-6),
    torch.bfloat16: (5e-6, 4e-3),
    torch.float16: (5e-6, 5e-4),
}


def definition(logits, targets, temperature=1.0, vocab_size=None, soft_cap=None):
    """Log-prob and entropy from the definitions, in fp64, written without the op's statistics."""
    z = logits.double()[:, :vocab_size]
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    z = z / temperature
    p = torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)
    entropy = -(torch.where(p > 0, p, 1.0).log() * p).sum(-1)
    return p[torch.arange(len(targets)), targets].log(), entropy


def case(num_tokens, vocab, dtype=torch.float32, scale=3.0, seed=0, vocab_size=None):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, vocab, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, vocab_size or vocab, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator)
    return logits, targets, upstream


def values_and_gradient(function, logits, targets, upstream, **arguments):
    logits = logits.detach().clone().requires_grad_()
    logprob, entropy = function(logits, targets, **arguments)
    (upstream[0] * logprob + upstream[1] * entropy).sum().backward()
    return logprob.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 123, 1000])
@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, None), (0.7, None), (1.5, None), (0.7, 4.0)])
def test_values_and_gradients_are_the_definition(dtype, vocab, temperature, soft_cap):
    logits, targets, upstream = case(6, vocab, dtype)
    logprob, entropy, grad = values_and_gradient(
        ops.logprob_and_entropy, logits, targets, upstream, temperature=temperature, soft_cap=soft_cap
    )
    exact_logprob, exact_entropy, exact_grad = values_and_gradient(
        definition, logits.double(), targets, upstream.double(), temperature=temperature, soft_cap=soft_cap
    )
    assert logprob.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    value_tolerance, grad_tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(logprob.double(), exact_logprob, atol=value_tolerance, rtol=0)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=value_tolerance, rtol=0)
    torch.testing.assert_close(grad.double(), exact_grad, atol=grad_tolerance, rtol=grad_tolerance)


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(name):
    golden = np.load(GOLDENS)
    logits = torch.from_numpy(golden[f"{name}_logits"]).flatten(0, 1).requires_grad_()
    targets = torch.from_numpy(golden[f"{name}_labels"]).flatten()
    logprob, entropy = ops.logprob_and_entropy(logits, targets)
    np.testing.assert_allclose(logprob.detach(), golden[f"{name}_logp"].ravel(), atol=1e-9)
    np.testing.assert_allclose(entropy.detach(), golden[f"{name}_entropy"].ravel(), atol=1e-9)
    written = torch.from_numpy(golden[f"{name}_mask"]).flatten() > 0
    np.testing.assert_allclose(entropy[written].mean().item(), golden[f"{name}_entropy_loss_token-mean"], atol=1e-9)
    entropy.sum().backward()
    np.testing.assert_allclose(logits.grad, golden[f"{name}_entropy_grad"].reshape(logits.shape), atol=1e-9)
    for temperature in (0.7, 1.5):
        logprob, _ = ops.logprob_and_entropy(logits.detach(), targets, temperature=temperature)
        np.testing.assert_allclose(logprob, golden[f"{name}_logp_temp{temperature}"].ravel(), atol=1e-9)


def test_gradcheck():
    logits, targets, _ = case(5, 11, torch.float64, vocab_size=9)
    assert torch.autograd.gradcheck(
        lambda z: ops.logprob_and_entropy(z, targets, temperature=0.8, vocab_size=9), logits.requires_grad_()
    )
    targets[1] = -100
    assert torch.autograd.gradcheck(
        lambda z: ops.logprob_and_entropy(z, targets, temperature=0.8, vocab_size=9, soft_cap=2.0), logits
    )


@pytest.mark.parametrize("used", ["logprob", "entropy"])
def test_one_output_may_go_unused(used):
    logits, targets, upstream = case(6, 50)
    upstream[1 if used == "logprob" else 0] = 0
    expected = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)[2]
    logits.requires_grad_()
    output = ops.logprob_and_entropy(logits, targets)[0 if used == "logprob" else 1]
    (output * upstream.sum(0)).sum().backward()
    torch.testing.assert_close(logits.grad, expected, atol=1e-7, rtol=0)


def test_padded_columns_have_no_probability_and_no_gradient():
    logits, targets, upstream = case(7, 12, vocab_size=9)
    logits[:, 9:] = 50.0
    padded = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream, vocab_size=9)
    plain = values_and_gradient(ops.logprob_and_entropy, logits[:, :9], targets, upstream)
    assert torch.equal(padded[0], plain[0]) and torch.equal(padded[1], plain[1])
    assert torch.equal(padded[2][:, :9], plain[2]) and not padded[2][:, 9:].any()


def test_masked_columns_are_columns_that_are_not_there():
    logits, targets, upstream = case(7, 12, vocab_size=9)
    logits[:, 9:] = -torch.inf
    masked = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)
    plain = values_and_gradient(ops.logprob_and_entropy, logits[:, :9], targets, upstream)
    torch.testing.assert_close(masked[0], plain[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(masked[1], plain[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(masked[2][:, :9], plain[2], atol=1e-6, rtol=0)
    assert not masked[2][:, 9:].any()
    logprob, entropy = ops.logprob_and_entropy(logits, torch.full_like(targets, 10))
    assert torch.equal(logprob, torch.full_like(logprob, -torch.inf)) and entropy.isfinite().all()


def test_nan_is_not_hidden():
    logits, targets, _ = case(3, 12)
    logits[1, 4] = torch.nan
    logprob, entropy = ops.logprob_and_entropy(logits, targets)
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("chunk_elements", [1, 1 << 18], ids=["a row a chunk", "one chunk"])
def test_ignored_tokens_are_not_there(monkeypatch, chunk_elements):
    monkeypatch.setattr(ops, "CHUNK_ELEMENTS", chunk_elements)
    logits, targets, upstream = case(6, 50, torch.bfloat16)
    kept = torch.tensor([1, 3, 4])
    expected = values_and_gradient(ops.logprob_and_entropy, logits[kept], targets[kept], upstream[:, kept])
    ignored = torch.ones(6, dtype=torch.bool).index_fill(0, kept, False)
    logits[ignored] = torch.nan
    logprob, entropy, grad = values_and_gradient(
        ops.logprob_and_entropy, logits, targets.masked_fill(ignored, -100), upstream
    )
    for found, values in zip((logprob, entropy, grad), expected, strict=True):
        torch.testing.assert_close(found[kept], values, atol=1e-6, rtol=0)
        assert not found[ignored].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_extreme_logits(temperature):
    logits, targets, upstream = case(6, 123)
    logits[:, ::2] = -1e4
    logits[1, :] = 1e4
    logits[2, 7] = 1e4
    logits[3, :60] = -torch.inf
    targets[:] = 61
    logprob, entropy, grad = values_and_gradient(
        ops.logprob_and_entropy, logits, targets, upstream, temperature=temperature
    )
    z = torch.log_softmax(logits.double() / temperature, dim=-1)
    p = z.exp()
    exact_logprob, exact_entropy = z[:, 61], -(p * z).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(logprob.double(), exact_logprob, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=5e-6, rtol=0)
    slope = upstream[1].double()[:, None] * (z + exact_entropy[:, None]).nan_to_num(0.0, neginf=0.0)
    exact_grad = -p * (slope + upstream[0].double()[:, None])
    exact_grad[:, 61] += upstream[0]
    torch.testing.assert_close(grad.double(), exact_grad / temperature, atol=5e-6, rtol=1e-6)


def test_large_logits_keep_their_digits():
    logits, targets, upstream = case(6, 123)
    # 4096 is added exactly to logits that are multiples of 2^-10.
    logits = (logits * 1024).round() / 1024
    near = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)
    far = values_and_gradient(ops.logprob_and_entropy, logits + 4096.0, targets, upstream)
    for a, b in zip(near, far, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


def test_chunks_do_not_show(monkeypatch):
    logits, targets, upstream = case(11, 40, torch.bfloat16)
    whole = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)
    monkeypatch.setattr(ops, "CHUNK_ELEMENTS", 100)
    chunked = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest fp32 tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_no_fp32_copy_of_all_logits(monkeypatch):
    monkeypatch.setattr(ops, "CHUNK_ELEMENTS", 4000)
    logits, targets, upstream = case(64, 1000, torch.bfloat16)
    with LargestFloat32() as largest:
        statistics = ops.reference_local_statistics(logits, targets, 0.7, 30.0, 0, 990)
        maximum, log_sum, _, entropy = ops.merge_statistics(statistics[None], targets, 0.7)
        ops.reference_backward_into(logits, logits, targets, maximum, log_sum, entropy, *upstream, 0.7, 30.0, 0, 990)
    assert 0 < largest.num_elements <= 4000


def test_the_backward_may_overwrite_the_logits():
    logits, targets, upstream = case(6, 50, torch.bfloat16)
    expected = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)[2]
    parameter = logits.clone().requires_grad_()
    produced = parameter * 1.0
    produced.retain_grad()
    logprob, entropy = ops.logprob_and_entropy(produced, targets, inplace_backward=True)
    loss = (upstream[0] * logprob + upstream[1] * entropy).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(parameter.grad, expected) and torch.equal(produced.detach(), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tokens():
    logits = torch.empty(0, 8, requires_grad=True)
    logprob, entropy = ops.logprob_and_entropy(logits, torch.empty(0, dtype=torch.int64))
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,) and logits.grad.shape == (0, 8)


def test_strided_logits_and_targets():
    logits, targets, upstream = case(6, 10)
    expected = values_and_gradient(ops.logprob_and_entropy, logits, targets, upstream)
    transposed = logits.t().contiguous().t()
    spread = torch.stack([targets, targets], dim=1)[:, 0]
    strided = values_and_gradient(ops.logprob_and_entropy, transposed, spread, upstream)
    for a, b in zip(expected, strided, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_the_inner_ops_are_well_formed():
    logits, targets, upstream = case(4, 9)
    for options in [(0.7, None, 0, 8), (0.7, 5.0, 0, 8)]:
        torch.library.opcheck(ops.local_statistics, (logits, targets, *options))
        statistics = ops.local_statistics(logits, targets, *options)
        maximum, log_sum, _, entropy = ops.merge_statistics(statistics[None], targets, 0.7)
        for upstreams in [(upstream[0], upstream[1]), (upstream[0], None), (None, upstream[1])]:
            torch.library.opcheck(
                ops.backward_into,
                (torch.empty_like(logits), logits, targets, maximum, log_sum, entropy, *upstreams, *options),
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be > 0"),
        ({"soft_cap": -1.0}, "soft_cap -1.0 must be > 0"),
        ({"vocab_size": 13}, "vocab_size 13 must lie in 1..12"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"\[N, V_local\]"),
        ({"logits": torch.zeros(3, 12, dtype=torch.int64)}, "must be bfloat16"),
        ({"logits": torch.zeros(3, 12).to(torch.float8_e4m3fn)}, "must be bfloat16"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    logits, targets, _ = case(3, 12)
    with pytest.raises(ValueError, match=message):
        ops.logprob_and_entropy(**({"logits": logits, "targets": targets} | change))


def test_greedy_match_takes_the_lowest_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0], [0.0, 1.0, 5.0]], dtype=torch.bfloat16)
    assert ops.greedy_match(logits, torch.tensor([1, 0, 1])).tolist() == [True, True, False]
    assert ops.greedy_match(logits, torch.tensor([2, 1, 2])).tolist() == [False, False, True]
    assert ops.greedy_match(logits, torch.tensor([1, 0, 1]), vocab_size=2).tolist() == [True, True, True]


VOCAB_SIZES = (20, 13, 9)  # of 20 columns: the last two leave one and two of four ranks with padding alone


def _on_shards():
    """{(vocab_size, ranks): results} of this rank's columns in a group of 2 and in a group of 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    gathered = []
    real = dist.all_gather_into_tensor

    def recorded(output, piece, group):
        gathered.append([*piece.shape])
        return real(output, piece, group=group)

    dist.all_gather_into_tensor = recorded
    results = {}
    for vocab_size in VOCAB_SIZES:
        for ranks, group in groups.items():
            logits, targets, upstream = case(9, 20, seed=1, vocab_size=vocab_size)
            own = logits.chunk(ranks, dim=1)[dist.get_rank(group)]
            arguments = {"group": group, "temperature": 0.7, "vocab_size": vocab_size}
            values = values_and_gradient(ops.logprob_and_entropy, own, targets, upstream, **arguments)
            match = ops.greedy_match(own, targets, group, vocab_size)
            tied = ops.greedy_match(torch.zeros(2, 5), torch.tensor([0, 5]), group)
            results[vocab_size, ranks] = (*values, match, tied, list(gathered))
            gathered.clear()
    return results


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(_on_shards, 4)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_one_rank(sharded, vocab_size, ranks):
    logits, targets, upstream = case(9, 20, seed=1, vocab_size=vocab_size)
    logprob, entropy, grad = values_and_gradient(
        ops.logprob_and_entropy, logits, targets, upstream, temperature=0.7, vocab_size=vocab_size
    )
    match = ops.greedy_match(logits, targets, vocab_size=vocab_size)
    results = [rank_results[vocab_size, ranks] for rank_results in sharded]
    for rank_logprob, rank_entropy, _, rank_match, rank_tied, gathered in results:
        torch.testing.assert_close(rank_logprob, logprob, atol=1e-6, rtol=0)
        torch.testing.assert_close(rank_entropy, entropy, atol=1e-6, rtol=0)
        assert torch.equal(rank_logprob, results[0][0]) and torch.equal(rank_entropy, results[0][1])
        assert torch.equal(rank_match, match)
        assert rank_tied.tolist() == [True, False]
        # One collective for log-prob, entropy and gradient together, and one for each greedy_match.
        assert gathered == [[4, 9], [2, 9], [2, 2]]
    whole = torch.cat([result[2] for result in results[:ranks]], dim=1)
    torch.testing.assert_close(whole, grad, atol=1e-6, rtol=0)
