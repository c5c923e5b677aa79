"""GAE and reward-to-go against verl's, a loop over tokens, and the identities that they must hold."""

import numpy as np
import pytest
import torch

from megarl.algorithms import gae, whitening
from tests.algorithms.batches import golden, pack, responses

GOLDEN = golden("gae")
CASES = ["g1.0_l1.0", "g1.0_l0.95", "g0.99_l0.95", "g0.9_l0.0", "g0.99_l1.0"]


def by_hand(rewards, values, mask, gamma, lam):
    """Token by token from the end; what is masked out is not there."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(len(mask)):
        next_value = next_advantage = 0.0
        for t in reversed(np.flatnonzero(mask[row])):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, t]
            advantages[row, t], returns[row, t] = next_advantage, next_advantage + next_value
    return advantages, returns


def estimate(rewards, values, mask, gamma, lam):
    batch, place = pack(mask, values=values)
    rewards = pack(mask, logprobs=rewards * mask)[0].logprobs
    found = gae.gae(rewards, batch, gamma, lam)
    assert not any(x[batch.loss_mask == 0].any() for x in found)
    return batch, place, *found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(name, case):
    mask, gamma, lam = GOLDEN[f"{name}_mask"], *(float(x[1:]) for x in case.split("_"))
    arrays = GOLDEN[f"{name}_rewards"], GOLDEN[f"{name}_values"]
    batch, place, advantages, returns = estimate(*arrays, mask, gamma, lam)
    whitened = whitening.whiten(advantages, batch.loss_mask)
    for found, which in [(advantages, "adv_raw"), (returns, "returns"), (whitened, "adv_whitened")]:
        expected = GOLDEN[f"{name}_{case}_{which}"] * mask
        np.testing.assert_allclose(responses(found, place, mask.shape), expected, atol=1e-8, err_msg=which)
    for found, which in [(advantages, "adv"), (returns, "returns")]:  # these masks have no holes
        expected = GOLDEN[f"{name}_{case}_openrlhf_{which}"] * mask
        np.testing.assert_allclose(
            responses(found, place, mask.shape), expected, atol=1e-8, err_msg=f"openrlhf {which}"
        )


MASKS = {
    "holes": [[1, 0, 0, 1, 1], [0, 1, 1, 0, 1]],
    "one token": [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
    "an empty row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "nothing": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.7), (0.5, 0.0)])
@pytest.mark.parametrize("which", MASKS)
def test_the_definition(which, gamma, lam):
    random, mask = np.random.default_rng(1), np.array(MASKS[which])
    rewards, values = random.normal(size=(2, 2, 5))
    _, place, advantages, returns = estimate(rewards, values, mask, gamma, lam)
    expected = by_hand(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(responses(advantages, place, mask.shape), expected[0], atol=1e-12)
    np.testing.assert_allclose(responses(returns, place, mask.shape), expected[1], atol=1e-12)


def test_without_discounts_it_is_the_reward_to_go_less_the_value():
    random, mask = np.random.default_rng(2), np.array(MASKS["holes"])
    rewards, values = random.normal(size=(2, 2, 5))
    batch, place, advantages, returns = estimate(rewards, values, mask, 1.0, 1.0)
    to_go = (rewards * mask)[:, ::-1].cumsum(1)[:, ::-1] * mask
    np.testing.assert_allclose(responses(advantages, place, mask.shape), to_go - values * mask, atol=1e-12)
    np.testing.assert_allclose(responses(returns, place, mask.shape), to_go, atol=1e-12)
    packed = pack(mask, logprobs=rewards * mask)[0].logprobs
    torch.testing.assert_close(gae.reward_to_go(packed, batch), returns, atol=1e-12, rtol=0)
