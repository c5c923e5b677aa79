"""REINFORCE++ against verl's, and its tricks all together."""

import numpy as np
import pytest
import torch

from megarl.algorithms import reinforce_plus_plus as rfpp
from tests.algorithms.batches import golden, pack, responses

GOLDEN = golden("outcome_advantages")


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("name", ["c0", "c2", "c4"])
def test_golden_vectors(name, gamma):
    """Their token rewards as a charged KL, and the last one as the score; c2 has holes."""
    mask, tokens = GOLDEN[f"{name}_mask"], GOLDEN[f"{name}_tok_rewards"]
    rows, last = np.arange(len(mask)), np.array([np.flatnonzero(row)[-1] for row in mask])
    charged = tokens * mask
    charged[rows, last] = 0.0
    batch, place = pack(mask, None, tokens[rows, last], logprobs=-charged)
    batch = batch.with_(ref_logprobs=torch.zeros_like(batch.logprobs))
    for whitened, key in [(True, "adv"), (False, "ret")]:
        config = rfpp.Config(use_kl_in_reward=True, gamma=gamma, normalize_advantage=whitened)
        found = responses(rfpp.advantages(batch, config, kl_coef=1.0).advantages, place, mask.shape)
        np.testing.assert_allclose(found, GOLDEN[f"{name}_rfpp_g{gamma}_{key}"] * mask, atol=1e-6)


def test_all_tricks_are_the_whitened_reward_to_go():
    """Scores normalised and clipped, a KL for each token, everything whitened."""
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 0, 1]])
    kl, scores = np.random.default_rng(0).normal(size=(3, 3)) * mask, np.array([1.0, 2.0, 6.0])
    batch, place = pack(mask, None, scores, logprobs=kl)
    batch = batch.with_(ref_logprobs=torch.zeros_like(batch.logprobs))

    def found(**keys):
        config = rfpp.Config(use_kl_in_reward=True, normalize_reward=True, reward_clip_range=1.0, **keys)
        return responses(rfpp.advantages(batch, config, kl_coef=0.2).advantages, place, mask.shape)

    shaped = np.clip((scores - 3) / (np.sqrt(7) + 1e-8), -1, 1)
    to_go = (shaped[:, None] - 0.2 * kl[:, ::-1].cumsum(1)[:, ::-1]) * mask
    values = to_go[mask > 0]
    expected = (to_go - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8) * mask
    np.testing.assert_allclose(found(), expected, atol=1e-12)
    whole = (shaped - 0.2 * kl.sum(1))[:, None] * mask
    np.testing.assert_allclose(found(token_level_kl=False, normalize_advantage=False), whole, atol=1e-12)
    on = found(normalize_advantage=False)
    np.testing.assert_allclose(on, to_go, atol=1e-12)
    assert np.abs(on - whole).max() > 0.01
