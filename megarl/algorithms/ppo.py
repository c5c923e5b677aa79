"""PPO: a critic's generalised advantage estimates under the clipped surrogate (Schulman et al., arXiv 1707.06347).

    r_t = score * 1[t is the last written token] - kl_coef * kl_t            (the KL with use_kl_in_reward)
    A_t = GAE(r, values; gamma, lam)                                          gae.py
    L   = clipped surrogate with dual clip                                    policy_ratio.py

and the critic learns the returns A_t + V_t, taken before whitening (value_loss.py). With one pass and one mini-batch
w = 1 and the gradient is A2C's: -A_t grad logprob_t.

Assumptions, and what is done where systems differ:
- Advantages are whitened over all written tokens of the step (always in verl, TRL and NeMo-RL);
  normalize_advantage=false leaves them. Which variance: whitening.py.
- The score stands on the last written token; TRL's PPO puts it one past the end where it fits.
- whiten_rewards is before GAE and keeps the mean (TRL). Observation tokens are skipped without a discount (gae.py).
- use_pf_ppo draws the step's completions again by their scores, before all of this (pf_ppo.py).
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, gae, policy_loss, policy_ratio, reward_shaping, whitening
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.algorithms.pf_ppo import PFPPOConfig
from megarl.config.base import key
from megarl.types import Batch


class Config(
    policy_loss.PolicyLossConfig,
    policy_ratio.DualClipConfig,
    aggregation.AggregationConfig,
    reward_shaping.RewardShapingConfig,
):
    name: Literal["ppo"] = key("ppo", "Proximal policy optimisation, with a critic.")
    gamma: float = key(1.0, "Discount per written token.", ge=0, le=1)
    lam: float = key(1.0, "GAE's lambda: 1 trusts rewards alone, 0 the critic's next value.", ge=0, le=1)
    normalize_advantage: bool = key(True, "Whiten advantages over all tokens of the step.")
    use_pf_ppo: bool = key(False, "PF-PPO: draw the step's completions again by their scores.")
    pf_ppo: PFPPOConfig = key(PFPPOConfig(), "How, with use_pf_ppo.")


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True, critic=True, resample=config.use_pf_ppo)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages and returns [N] from scores and values; 0 on tokens that were not written.

    Two calls of sum_over_ranks for each of normalize_reward, whiten_rewards and normalize_advantage.
    """
    batch = reward_shaping.charge_kl(batch, config)
    scores = reward_shaping.shaped_scores(batch, config, sum_over_ranks)
    rewards = reward_shaping.token_rewards(batch, scores, kl_coef)
    if config.whiten_rewards:
        rewards = whitening.whiten(rewards, batch.loss_mask, sum_over_ranks, shift_mean=False)
    advantages, returns = gae.gae(rewards, batch, config.gamma, config.lam)
    if config.normalize_advantage:
        advantages = whitening.whiten(advantages, batch.loss_mask, sum_over_ranks)
    dtype = batch.loss_mask.dtype
    return batch.with_(advantages=advantages.to(dtype), returns=returns.to(dtype))


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] token weights of one mini-batch: aggregation.token_weights under loss_agg_mode."""
    return aggregation.token_weights(batch, config.loss_agg_mode, config.loss_scale_factor, sum_over_ranks)


def token_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    config: Config,
    full_kl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N] and entropy [N]."""
    ratio = policy_ratio.ratios(policy_ratio.log_ratios(logprobs, batch))
    loss, metrics = policy_ratio.clipped_loss(
        ratio, batch, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    )
    return policy_loss.finish(loss, metrics, logprobs, entropy, batch, config, full_kl)
