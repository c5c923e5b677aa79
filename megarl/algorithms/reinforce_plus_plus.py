"""REINFORCE++: PPO's tricks without a critic (Hu, arXiv 2501.03262).

    r_t = score * 1[t is the last written token] - kl_coef * kl_t            (the KL with use_kl_in_reward)
    A_t = whiten(r_t + gamma r_{t+1} + gamma^2 r_{t+2} + ...)                over all written tokens of the step
    L   = clipped surrogate with dual clip                                    policy_ratio.py

Assumptions, and what is done where systems differ:
- A_t is whitened token by token (verl, slime); which variance: whitening.py. normalize_advantage=false leaves it.
- token_level_kl=false charges the completion's whole KL on its last token instead, so that every token answers for all
  of it, and not for what follows only.
- Tokens that were not written are skipped without a discount (verl 0.9.1; gae.py). verl 0.8 reset the sum there.
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, gae, policy_loss, policy_ratio, reward_shaping, sequences, whitening
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(
    policy_loss.PolicyLossConfig,
    policy_ratio.DualClipConfig,
    aggregation.AggregationConfig,
    reward_shaping.RewardShapingConfig,
):
    name: Literal["reinforce_plus_plus"] = key("reinforce_plus_plus", "REINFORCE with whitened rewards-to-go.")
    gamma: float = key(1.0, "Discount per written token.", ge=0, le=1)
    normalize_advantage: bool = key(True, "Whiten advantages over all tokens of the step.")
    token_level_kl: bool = key(True, "Charge each token its own KL; false charges the sum on the last token.")


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]; 0 on tokens that were not written.

    Two calls of sum_over_ranks for each of normalize_reward, whiten_rewards and normalize_advantage.
    """
    batch = reward_shaping.charge_kl(batch, config)
    scores = reward_shaping.shaped_scores(batch, config, sum_over_ranks)
    if config.token_level_kl:
        rewards = reward_shaping.token_rewards(batch, scores, kl_coef)
    else:
        rewards = sequences.on_last_token(reward_shaping.sequence_rewards(batch, scores, kl_coef), batch)
    if config.whiten_rewards:
        rewards = whitening.whiten(rewards, batch.loss_mask, sum_over_ranks, shift_mean=False)
    advantages = gae.reward_to_go(rewards, batch, config.gamma)
    if config.normalize_advantage:
        advantages = whitening.whiten(advantages, batch.loss_mask, sum_over_ranks)
    return batch.with_(advantages=advantages.to(batch.loss_mask.dtype))


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
