"""Token weights against verl's agg_loss, and their independence of the layout."""

import numpy as np
import pytest
import torch

from megarl.algorithms.aggregation import LossAggMode, token_weights
from tests.algorithms.batches import golden, on_ranks, pack, take

GOLDEN = golden("agg_loss")
MODES = LossAggMode.__args__


def horizon_of(mode, length):
    return length if mode == "seq-mean-token-sum-norm" else None


def weighted(batch, place, loss, weights):
    return (weights.double() * torch.where(place >= 0, torch.from_numpy(loss).flatten()[place.clamp(min=0)], 0)).sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(mode, name):
    loss, mask = GOLDEN[f"{name}_loss"], GOLDEN[f"{name}_mask"]
    batch, place = pack(mask)
    total = weighted(batch, place, loss, token_weights(batch, mode, horizon_of(mode, mask.shape[1])))
    np.testing.assert_allclose(total, GOLDEN[f"{name}_{mode}_"], rtol=2e-8)  # verl adds 1e-8 to the length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors_with_global_counts(mode, name):
    """A rank of two that has been told that there are 100 tokens and 16 sequences; verl averages over ranks, we sum."""
    loss, mask = GOLDEN[f"{name}_loss"], GOLDEN[f"{name}_mask"]
    batch, place = pack(mask)
    counts = torch.tensor([100.0, 16.0], dtype=torch.float64)
    weights = token_weights(batch, mode, horizon_of(mode, mask.shape[1]), lambda _: counts)
    expected = GOLDEN[f"{name}_{mode}_dp_size2_batch_num_tokens100_global_batch_size16"] / 2
    np.testing.assert_allclose(
        weighted(batch, place, loss, weights), expected, rtol=2e-8
    )  # verl adds 1e-8 to the length


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors_with_another_horizon(name):
    loss, mask = GOLDEN[f"{name}_loss"], GOLDEN[f"{name}_mask"]
    batch, place = pack(mask)
    total = weighted(batch, place, loss, token_weights(batch, "seq-mean-token-sum-norm", 37))
    np.testing.assert_allclose(total, GOLDEN[f"{name}_seq-mean-token-sum-norm_loss_scale_factor37"], rtol=1e-9)


def test_the_formulas_on_three_sequences():
    mask = np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    batch, place = pack(mask, dtype=torch.float32)
    expected = {
        "token-mean": np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]) / 4,
        "seq-mean-token-sum": np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]) / 2,
        "seq-mean-token-mean": np.array([[1 / 3, 0, 1 / 3, 1 / 3], [1, 0, 0, 0], [0, 0, 0, 0]]) / 2,
        "seq-mean-token-sum-norm": np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]) / 2 / 10,
    }
    for mode, values in expected.items():
        weights = token_weights(batch, mode, horizon_of(mode, 10))
        assert weights.dtype == torch.float32 and not weights[place < 0].any()
        np.testing.assert_allclose(weights[place >= 0], values.ravel()[place[place >= 0]], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [[[5, 0, 3], [1, 2, 4]], [[4], [], [0, 1, 2, 3, 5]]])
def test_weights_do_not_see_the_layout(mode, ranks):
    mask = np.random.default_rng(0).integers(0, 2, (6, 9))
    mask[2] = 0
    batch, _ = pack(mask)
    whole = token_weights(batch, mode, horizon_of(mode, 9))
    parts, tokens = zip(*(take(batch, rows) for rows in ranks), strict=True)
    split = on_ranks(lambda part, total: token_weights(part, mode, horizon_of(mode, 9), total), list(parts))
    for weights, own in zip(split, tokens, strict=True):
        assert torch.equal(weights, whole[own])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_written_weighs_nothing(mode):
    batch, _ = pack(np.zeros((2, 3)))
    assert token_weights(batch, mode, horizon_of(mode, 3)).tolist() == [0.0] * 3


def test_wrong_arguments_are_named():
    batch, _ = pack(np.ones((2, 3)))
    with pytest.raises(ValueError, match="'mean' is not one of token-mean, seq-mean-token-sum"):
        token_weights(batch, "mean")
    with pytest.raises(ValueError, match="needs a horizon"):
        token_weights(batch, "seq-mean-token-sum-norm")
