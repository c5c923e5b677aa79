"""RLOO's own: one action or many, its tricks, and its loss on whole completions."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import rloo
from tests.algorithms.batches import pack, responses, run_loss

MASK = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
KL = np.array([[0.3, -0.1, 9, 0.5], [0.1, 0.2, 0.4, 0.0], [0.7, 0, 0, 0], [0.2, 0.1, 0, 0]])
SCORES = np.array([1.0, 3.0, 0.0, 4.0])


def estimate(**keys):
    batch, place = pack(MASK, [0, 0, 1, 1], SCORES, logprobs=KL)
    batch = batch.with_(ref_logprobs=torch.zeros_like(batch.logprobs))
    config = rloo.Config(use_kl_in_reward=True, **keys)
    return responses(rloo.advantages(batch, config, kl_coef=0.5).advantages, place, MASK.shape)


def test_one_completion_is_one_action():
    rewards = SCORES - 0.5 * (KL * MASK).sum(1)
    expected = rewards - rewards[[1, 0, 3, 2]]
    np.testing.assert_allclose(estimate(), expected[:, None] * MASK, atol=1e-12)


def test_the_token_level_kl_charges_a_token_for_what_follows():
    rewards = SCORES - 0.5 * (KL * MASK).sum(1)
    later = (KL * MASK)[:, ::-1].cumsum(1)[:, ::-1]
    expected = (SCORES[:, None] - 0.5 * later - rewards[[1, 0, 3, 2]][:, None]) * MASK
    on, off = estimate(token_level_kl=True), estimate(token_level_kl=False)
    np.testing.assert_allclose(on, expected, atol=1e-12)
    assert np.abs(on - off).max() > 0.1
    np.testing.assert_allclose(on[:, 0], off[:, 0], atol=1e-12)  # the first token answers for the whole completion


def test_whitened_rewards_and_normalised_advantages():
    rewards = SCORES - 0.5 * (KL * MASK).sum(1)
    expected = rewards / np.sqrt(rewards.var(ddof=1) + 1e-8)
    expected = expected - expected[[1, 0, 3, 2]]
    np.testing.assert_allclose(estimate(whiten_rewards=True), expected[:, None] * MASK, atol=1e-12)
    plain = rewards - rewards[[1, 0, 3, 2]]
    normal = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(estimate(normalize_advantage=True), normal[:, None] * MASK, atol=1e-12)
    tokens = estimate(token_level_kl=True, normalize_advantage=True)[MASK > 0]
    assert tokens.mean() == pytest.approx(0, abs=1e-12) and tokens.var(ddof=1) == pytest.approx(1, abs=1e-6)


def loss_case(advantages):
    random = np.random.default_rng(3)
    old, new = random.normal(size=(2, 4, 4)) * 0.2
    batch, place = pack(MASK, [0, 0, 1, 1], SCORES, logprobs=old, advantages=np.array(advantages)[:, None] * MASK)
    return old, new, batch, place, torch.from_numpy(new).flatten()[place.clamp(min=0)]


def test_the_loss_clips_the_ratio_of_the_whole_completion():
    advantages = np.array([1.0, -2.0, 0.5, -1.0])
    old, new, batch, place, logprobs = loss_case(advantages)
    loss, gradient, metrics = run_loss(rloo, batch, logprobs, rloo.Config(clip_ratio_low=0.1, clip_ratio_high=0.15))
    ratio = np.exp(((new - old) * MASK).sum(1))
    clipped = np.clip(ratio, 0.9, 1.15)
    terms = np.maximum(-ratio * advantages, -clipped * advantages)
    assert (clipped != ratio).any() and (terms == -ratio * advantages).any() and (terms != -ratio * advantages).any()
    assert loss == pytest.approx(terms.mean(), abs=1e-12)
    slope = np.where(terms == -ratio * advantages, -ratio * advantages, 0.0) / 4
    np.testing.assert_allclose(responses(gradient, place, MASK.shape), slope[:, None] * MASK, atol=1e-12)
    lengths = MASK.sum(1)
    assert metrics["val/ratio"] == pytest.approx((ratio * lengths).sum() / lengths.sum())


def test_with_a_token_level_kl_each_token_has_its_own_ratio():
    advantages = np.array([1.0, -2.0, 0.5, -1.0])
    old, new, batch, place, logprobs = loss_case(advantages)
    loss, _, _ = run_loss(rloo, batch, logprobs, rloo.Config(token_level_kl=True))
    ratio, a = np.exp(new - old), advantages[:, None]
    terms = np.maximum(-ratio * a, -np.clip(ratio, 0.8, 1.2) * a) * MASK
    assert loss == pytest.approx(terms.sum() / 4, abs=1e-12)


def test_both_have_one_gradient_before_the_first_step():
    """-A_b / S on every token: REINFORCE's."""
    advantages = np.array([1.0, -2.0, 0.5, -1.0])
    _, _, batch, place, _ = loss_case(advantages)
    for token_level in (True, False):
        gradient = run_loss(rloo, batch, batch.logprobs, rloo.Config(token_level_kl=token_level))[1]
        np.testing.assert_allclose(responses(gradient, place, MASK.shape), -advantages[:, None] * MASK / 4, atol=1e-12)


def test_a_token_weight_does_not_fit_one_action():
    with pytest.raises(ValidationError, match="rloo's action is the whole completion"):
        rloo.Config(rollout_correction={"rollout_is": "token"})
    rloo.Config(rollout_correction={"rollout_is": "token"}, token_level_kl=True)
