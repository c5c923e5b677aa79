"""Online DPO against TRL's, its hand-off through the advantages, and its metrics over pairs."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import metrics, online_dpo
from tests.algorithms.batches import golden, pack, responses, take

GOLDEN = golden("online_dpo")


def golden_case(name, **keys):
    """(batch with advantages, place, config); the second completion of pair i is row B + i."""
    mask = GOLDEN[f"{name}_mask"]
    pairs = np.arange(len(mask)) % (len(mask) // 2)
    batch, place = pack(
        mask, pairs, GOLDEN[f"{name}_rewards"], logprobs=GOLDEN[f"{name}_logp"], ref_logprobs=GOLDEN[f"{name}_ref"]
    )
    config = online_dpo.Config(**keys)
    return online_dpo.advantages(batch, config, kl_coef=config.kl_controller().value), place, config


def run(batch, config, logprobs=None):
    logprobs = (batch.logprobs if logprobs is None else logprobs).detach().clone().requires_grad_()
    batch = batch.with_(token_weights=online_dpo.weights(batch, config))
    loss, found = online_dpo.token_loss(logprobs, torch.zeros_like(logprobs), batch, config)
    total = (batch.token_weights * loss).sum()
    means = {name: (values.sum() / batch.loss_mask.sum()).item() for name, values in found.items()}
    return total.item(), torch.autograd.grad(total, logprobs)[0], metrics.finished(means)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(name, loss_type, beta):
    batch, place, config = golden_case(name, loss_type=loss_type, beta=beta)
    mask, key = GOLDEN[f"{name}_mask"], f"{name}_{loss_type}_b{beta}"
    signs = responses(batch.advantages, place, mask.shape)
    chosen = np.flatnonzero((signs > 0).any(1))
    np.testing.assert_array_equal(chosen, np.sort(GOLDEN[f"{key}_chosen_idx"]))
    total, gradient, found = run(batch, config)
    np.testing.assert_allclose(total, GOLDEN[key], rtol=1e-6)
    expected = GOLDEN[f"{key}_grad"]
    np.testing.assert_allclose(responses(gradient, place, mask.shape), expected * mask, atol=1e-7)
    rewards = GOLDEN[f"{name}_rewards"]
    margin = rewards[GOLDEN[f"{key}_chosen_idx"]] - rewards[GOLDEN[f"{key}_rejected_idx"]]
    assert found["objective/scores_margin"] == pytest.approx(margin.mean(), abs=1e-9)
    assert found["beta"] == pytest.approx(beta)


MASK = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 0]])


def pairs_case(scores, **keys):
    random = np.random.default_rng(4)
    logp, ref = random.normal(size=(2, 4, 3))
    batch, place = pack(MASK, [0, 0, 1, 1], np.float64(scores), logprobs=logp, ref_logprobs=ref)
    config = online_dpo.Config(**keys)
    return logp, ref, place, online_dpo.advantages(batch, config, kl_coef=config.kl_controller().value), config


def test_a_tie_chooses_the_first():
    _, _, place, batch, _ = pairs_case([2.0, 2.0, 0.0, 1.0], beta=0.3)
    assert responses(batch.advantages, place, MASK.shape)[:, 0].tolist() == [0.3, -0.3, -0.3, 0.3]
    swapped = take(batch, [1, 0, 3, 2])[0]  # the first stays the first wherever it stands
    swapped = online_dpo.advantages(swapped, online_dpo.Config(), kl_coef=0.3)
    assert swapped.advantages[swapped.cu_seqlens[1:].long() - 1].tolist() == [-0.3, 0.3, 0.3, -0.3]


def test_the_metrics_are_means_over_pairs():
    logp, ref, _, batch, config = pairs_case([2.0, 5.0, 0.0, 1.0], beta=0.3)
    loss, _, found = run(batch, config)
    sums, h = (logp * MASK).sum(1), 0.3 * ((logp - ref) * MASK).sum(1)
    margins = np.array([h[1] - h[0], h[3] - h[2]])
    expected = {
        "logps/chosen": sums[[1, 3]].mean(),
        "logps/rejected": sums[[0, 2]].mean(),
        "rewards/chosen": h[[1, 3]].mean(),
        "rewards/rejected": h[[0, 2]].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).mean(),
        "objective/scores_margin": 2.0,
        "beta": 0.3,
        "policy/approxkl_avg": 0.0,
        "policy/entropy_avg": 0.0,
    }
    assert found == pytest.approx(expected, abs=1e-12)
    assert loss == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-12)


def test_the_kl_is_reported_as_charged():
    logp, ref, place, batch, _ = pairs_case([2.0, 5.0, 0.0, 1.0])
    np.testing.assert_allclose(responses(batch.reward_kl, place, MASK.shape), (logp - ref) * MASK, atol=1e-12)


def test_an_empty_completion_can_be_chosen_and_a_cut_pair_cannot():
    mask = np.array([[0, 0], [1, 1], [0, 0], [0, 0]])
    batch, _ = pack(
        mask, [0, 0, 1, 1], np.array([1.0, 0, 1, 0]), logprobs=np.ones((4, 2)), ref_logprobs=np.zeros((4, 2))
    )
    config = online_dpo.Config(beta=0.5)
    batch = online_dpo.advantages(batch, config, kl_coef=0.5)
    loss, gradient, found = run(batch, config)
    assert loss == pytest.approx(np.log1p(np.exp(1.0)))  # -log sigmoid(-0.5 * 2)
    assert torch.isfinite(gradient).all() and found["rewards/rejected"] == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="a pair is cut"):
        run(take(batch, [1])[0], config)


def test_beta_may_follow_the_epochs():
    controller = online_dpo.Config(beta=[0.5, 0.1]).kl_controller()
    assert controller.value == 0.5
    controller.update(0.0, 8, epoch=1)
    assert controller.value == 0.1
    assert online_dpo.needs(online_dpo.Config()).reference and online_dpo.needs(online_dpo.Config()).whole_groups


@pytest.mark.parametrize("beta", [0, -0.1, [], [0.1, 0.0]])
def test_beta_is_above_zero(beta):
    with pytest.raises(ValidationError, match="beta.*must be greater than 0"):
        online_dpo.Config(beta=beta)
