"""Dr. GRPO: GRPO without its two biases (Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783).

    A_b = R_b - mean of its group's rewards                     no division by the standard deviation
    L   = 1/S sum_b 1/loss_scale_factor sum_t clipped loss      a fixed length instead of each completion's own

so neither easy or hard prompts nor short completions weigh more than others. Example: scores 1, 0, 2 give 0, -1, +1.

Assumptions, and what is done where systems differ:
- S counts the sequences with a written token (verl 0.9.1); TRL divides by all, verl 0.8 not by the sequences at all.
- A group of one keeps its reward as its advantage (verl). R, the ratio and its clips: as in grpo; the paper has no
  dual clip, so it is off unless clip_ratio_c is set.
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.DualClipConfig):
    name: Literal["dr_grpo"] = key("dr_grpo", "GRPO without the division by standard deviation and by length.")
    clip_ratio_c: float | None = key(None, "Dual clip: a negative advantage is weighted by at most this ratio.", gt=1)
    loss_scale_factor: float = key(
        ..., "Tokens that a sequence's loss is divided by, whatever its length: usually data.max_response_length.", gt=0
    )


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]: the sequence's on written tokens, 0 elsewhere. One call of sum_over_ranks."""
    batch = reward_shaping.charge_kl(batch, config)
    rewards = reward_shaping.sequence_rewards(batch, batch.scores, kl_coef)
    advantages = groups.centred(rewards, batch, sum_over_ranks).to(batch.loss_mask.dtype)
    return batch.with_(advantages=sequences.spread(advantages, batch))


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] token weights of one mini-batch: 1 / (S loss_scale_factor)."""
    return aggregation.token_weights(batch, "seq-mean-token-sum-norm", config.loss_scale_factor, sum_over_ranks)


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
