"""REINFORCE++-baseline: the group's mean as baseline, whitened over the whole step (Hu et al., arXiv 2501.03262).

    A_b = R_b - mean of its group's rewards, then whitened over all written tokens of the step
    L   = clipped surrogate with dual clip                                    policy_ratio.py

Unlike GRPO it divides by one standard deviation for all groups.

Assumptions, and what is done where systems differ:
- R is the score, less kl_coef times the completion's whole KL with use_kl_in_reward (verl); OpenRLHF charges the KL
  token by token after the baseline. The paper puts a k2 KL in the loss: use_kl_loss=true, kl_loss_type=k2.
- Whitening is over tokens, so long completions weigh more in it (verl); which variance: whitening.py.
- A group of one keeps its reward (verl).
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences, whitening
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(
    policy_loss.PolicyLossConfig,
    policy_ratio.DualClipConfig,
    aggregation.AggregationConfig,
    reward_shaping.RewardShapingConfig,
):
    name: Literal["reinforce_plus_plus_baseline"] = key(
        "reinforce_plus_plus_baseline", "REINFORCE with the group's mean as baseline, whitened over the step."
    )

    def check_group_size(self, n: int) -> None:
        if n < 2:
            raise ValueError(f"rollout.n={n} leaves a completion nothing to be compared with; use at least 2")


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]; 0 on tokens that were not written.

    Three calls of sum_over_ranks, and two more for each of normalize_reward and whiten_rewards.
    """
    batch = reward_shaping.charge_kl(batch, config)
    scores = reward_shaping.shaped_scores(batch, config, sum_over_ranks)
    rewards = reward_shaping.sequence_rewards(batch, scores, kl_coef)
    if config.whiten_rewards:
        rewards = whitening.whiten(rewards, torch.ones_like(rewards), sum_over_ranks, shift_mean=False)
    centred = groups.centred(rewards, batch, sum_over_ranks)
    advantages = whitening.whiten(sequences.spread(centred, batch), batch.loss_mask, sum_over_ranks)
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
