"""ReMax: the score of the greedy completion is the baseline (Li et al., arXiv 2310.10505, algorithm 1).

    r_t = score * 1[t is the last written token] - kl_coef * kl_t            (the KL with use_kl_in_reward)
    A_t = r_t + r_{t+1} + ... - score of the greedy completion of the same prompt
    L   = clipped surrogate with dual clip                                    policy_ratio.py

Assumptions, and what is done where systems differ:
- The baseline is the greedy completion's score alone, without a KL (verl).
- The paper takes one plain REINFORCE step per batch; the surrogate is the same at the first mini-batch of a step, and
  keeps further ones near (verl).
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, gae, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.DualClipConfig, aggregation.AggregationConfig):
    name: Literal["remax"] = key("remax", "REINFORCE with the greedy completion's score as baseline.")


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True, greedy_baseline=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N] from scores and baseline_scores; 0 on tokens that were not written. No global sums."""
    batch = reward_shaping.charge_kl(batch, config)
    rewards = reward_shaping.token_rewards(batch, batch.scores, kl_coef)
    baseline = sequences.spread(batch.baseline_scores.double(), batch)
    return batch.with_(advantages=(gae.reward_to_go(rewards, batch) - baseline).to(batch.loss_mask.dtype))


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
