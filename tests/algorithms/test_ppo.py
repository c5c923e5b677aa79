"""PPO from scores and values to the loss; one pass and one mini-batch are A2C."""

import numpy as np
import torch

from megarl.algorithms import ppo
from tests.algorithms.batches import golden, pack, responses, run_loss

MASK = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
RANDOM = np.random.default_rng(5)
SCORES, KL, VALUES = RANDOM.normal(size=4), RANDOM.normal(size=(4, 4)), RANDOM.normal(size=(4, 4))


def a_batch():
    batch, place = pack(MASK, None, SCORES, logprobs=KL, values=VALUES)
    return batch.with_(ref_logprobs=torch.zeros_like(batch.logprobs)), place


def by_hand(gamma, lam, kl_coef, whiten_rewards):
    rewards = -kl_coef * KL * MASK
    for row, mask in enumerate(MASK):
        if mask.any():
            rewards[row, np.flatnonzero(mask)[-1]] += SCORES[row]
    if whiten_rewards:
        mean, variance = rewards[MASK > 0].mean(), rewards[MASK > 0].var(ddof=1)
        rewards = ((rewards - mean) / np.sqrt(variance + 1e-8) + mean) * MASK
    advantages, returns = np.zeros(MASK.shape), np.zeros(MASK.shape)
    for row, mask in enumerate(MASK):
        at = np.flatnonzero(mask)
        for i, t in enumerate(at):
            for j in range(i, len(at)):
                following = VALUES[row, at[j + 1]] if j + 1 < len(at) else 0.0
                delta = rewards[row, at[j]] + gamma * following - VALUES[row, at[j]]
                advantages[row, t] += (gamma * lam) ** (j - i) * delta
            returns[row, t] = advantages[row, t] + VALUES[row, t]
    return advantages, returns


def test_the_definition():
    for whiten_rewards in (False, True):
        config = ppo.Config(gamma=0.9, lam=0.8, use_kl_in_reward=True, whiten_rewards=whiten_rewards)
        batch, place = a_batch()
        filled = ppo.advantages(batch, config, kl_coef=0.3)
        advantages, returns = by_hand(0.9, 0.8, 0.3, whiten_rewards)
        chosen = advantages[MASK > 0]
        whitened = (advantages - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8) * MASK
        np.testing.assert_allclose(responses(filled.advantages, place, MASK.shape), whitened, atol=1e-12)
        np.testing.assert_allclose(responses(filled.returns, place, MASK.shape), returns, atol=1e-12)
        plain = ppo.advantages(batch, config.model_copy(update={"normalize_advantage": False}), kl_coef=0.3)
        np.testing.assert_allclose(responses(plain.advantages, place, MASK.shape), advantages, atol=1e-12)


def test_one_pass_and_one_mini_batch_are_a2c():
    """On the gradient of a softmax policy's logits, not of its log-probs only."""
    batch, place = a_batch()
    logits = torch.from_numpy(RANDOM.normal(size=(len(batch.tokens), 5))).requires_grad_()
    actions = torch.from_numpy(RANDOM.integers(0, 5, len(batch.tokens)))
    logprobs = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    config = ppo.Config(lam=0.95)
    batch = ppo.advantages(batch.with_(logprobs=logprobs.detach()), config)
    loss, _ = ppo.token_loss(logprobs, torch.zeros_like(logprobs), batch, config)
    (found,) = torch.autograd.grad((ppo.weights(batch, config) * loss).sum(), logits, retain_graph=True)
    written = batch.loss_mask > 0
    actor_critic = -(batch.advantages * logprobs)[written].mean()
    (expected,) = torch.autograd.grad(actor_critic, logits)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_the_surrogate_of_token_advantages():
    losses = golden("policy_losses")
    mask = losses["c2_mask"]
    batch, place = pack(mask, logprobs=losses["c2_old"], advantages=losses["c2_adv_tok"] * mask)
    logprobs = torch.from_numpy(losses["c2_new"]).flatten()[place.clamp(min=0)]
    loss, gradient, _ = run_loss(ppo, batch, logprobs, ppo.Config())
    key = "c2_vanilla_token-mean_lo0.2_hi0.2_c3.0_tok_is0"
    np.testing.assert_allclose(loss, losses[key], rtol=1e-9)
    np.testing.assert_allclose(responses(gradient, place, mask.shape), losses[key + "_grad"] * mask, atol=1e-9)


def test_needs():
    assert ppo.needs(ppo.Config()).critic and not ppo.needs(ppo.Config()).resample
    assert ppo.needs(ppo.Config(use_pf_ppo=True)).resample
