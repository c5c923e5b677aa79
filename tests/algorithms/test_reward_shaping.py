"""From scores to rewards: the KL against verl's, TRL's and OpenRLHF's, and the tricks in their order."""

import numpy as np
import pytest
import torch

from megarl.algorithms import kl_control, objective, ppo, reward_shaping
from tests.algorithms.batches import golden, pack, responses

GOLDEN = golden("kl_in_reward")


def case(name, scale=1.0):
    mask = GOLDEN[f"{name}_mask"]
    return mask, *pack(
        mask,
        None,
        scale * GOLDEN[f"{name}_scores"],
        logprobs=GOLDEN[f"{name}_logp"],
        ref_logprobs=GOLDEN[f"{name}_ref"],
    )


def config_for(**keys):
    return ppo.Config(use_kl_in_reward=True, **keys)


@pytest.mark.parametrize("kl_coef", [0.05, 0.5])
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_token_rewards_of_verl(name, kind, kl_coef):
    mask, batch, place = case(name)
    batch = reward_shaping.charge_kl(batch, config_for(kl_penalty=kind))
    rewards = reward_shaping.token_rewards(batch, batch.scores, kl_coef)
    np.testing.assert_allclose(
        responses(rewards, place, mask.shape), GOLDEN[f"{name}_verl_{kind}_b{kl_coef}"], atol=1e-9
    )
    kl, coefficient = GOLDEN[f"{name}_verl_{kind}_b{kl_coef}_kl_and_newcoef"]
    observed = objective.metrics(batch, kl_coef=kl_coef)["objective/kl_per_token"]
    assert observed == pytest.approx(kl, abs=1e-9)
    control = kl_control.KLControlConfig(type="adaptive", kl_coef=kl_coef, target_kl=0.1, horizon=1000)
    controller = kl_control.controller(control)
    controller.update(observed, len(mask), epoch=0)
    assert controller.value == pytest.approx(coefficient, rel=1e-12)


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_rewards_of_openrlhf_and_trl(name):
    """OpenRLHF clips the score (here 4 times as large) to 5 and charges k1; it does so outside the mask too."""
    mask, batch, place = case(name, scale=4.0)
    config = config_for(reward_clip_range=5.0)
    batch = reward_shaping.charge_kl(batch, config)
    rewards = reward_shaping.token_rewards(batch, reward_shaping.shaped_scores(batch, config), 0.05)
    expected = GOLDEN[f"{name}_openrlhf_clip5_k1_b0.05"] * mask
    np.testing.assert_allclose(responses(rewards, place, mask.shape), expected, atol=1e-6)
    _, batch, _ = case(name)
    batch = reward_shaping.charge_kl(batch, config)
    found = reward_shaping.sequence_rewards(batch, batch.scores, 0.05)
    np.testing.assert_allclose(found, GOLDEN[f"{name}_trl_rloo_seq_rewards_b0.05"], atol=1e-9)


def shaped(scores, **keys):
    batch, _ = pack(np.ones((len(scores), 1)), scores=np.float64(scores))
    return reward_shaping.shaped_scores(batch, ppo.Config(**keys)).tolist()


def test_normalise_then_clip():
    scores = [1.0, 2.0, 6.0]  # mean 3, standard deviation sqrt(7)
    assert shaped(scores) == scores
    assert shaped(scores, normalize_reward=True) == pytest.approx(np.array([-2, -1, 3]) / (np.sqrt(7) + 1e-8))
    assert shaped(scores, reward_clip_range=1.5) == [1.0, 1.5, 1.5]
    both = shaped(scores, normalize_reward=True, reward_clip_range=0.5)
    assert both == pytest.approx([-0.5, -1 / np.sqrt(7), 0.5])
    assert shaped([0.0, 50.0]) == [0.0, 50.0]
    assert max(shaped([0.0] * 200 + [1.0], normalize_reward=True)) == 10.0  # 14.1 standard deviations
    assert shaped([3.0, 3.0], normalize_reward=True) == [0.0, 0.0] == shaped([7.0] * 2, normalize_reward=True)


def test_the_score_stands_on_the_last_written_token():
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    batch, place = pack(mask, scores=np.array([5.0, 6.0, 7.0]))
    rewards = reward_shaping.token_rewards(batch, batch.scores, 0.0)
    assert responses(rewards, place, mask.shape).tolist() == [[0, 0, 5, 0], [0, 0, 0, 0], [7, 0, 0, 0]]


def test_the_exact_kl_is_taken_as_it_comes():
    batch, _ = pack(np.array([[1, 0, 1]]), scores=np.zeros(1))
    batch = batch.with_(full_kl=torch.tensor([torch.nan, 0.3, 9.0, 0.5]).double())
    batch = reward_shaping.charge_kl(batch, config_for(kl_penalty="full"))
    np.testing.assert_allclose(batch.reward_kl, [0, 0.3, 0, 0.5])
    assert reward_shaping.sequence_rewards(batch, batch.scores, 0.5).item() == pytest.approx(-0.4)
