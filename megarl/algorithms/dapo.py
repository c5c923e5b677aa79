"""DAPO: GRPO's advantages, clip-higher, every token alike, and only groups that differ (Yu et al., arXiv 2503.14476).

    A_b = (R_b - mu_g) / (sigma_g + 1e-6)
    L   = 1/T sum over all tokens of -min(w A, clip(w, 1 - 0.2, 1 + 0.28) A)

Assumptions, and what is done where systems differ:
- Dynamic sampling (eq. 11): groups whose scores are all equal teach nothing and leave the batch: their tokens are
  masked out here, so that T does not count them. rollout.dynamic_sampling_rounds refills the batch before.
- The soft overlong punishment (eq. 13) is a reward's business, and so is part of R.
- Dual clip 10, as in the authors' recipe; the paper has none. No KL, as in the paper, unless it is asked for.
- The standard deviation is unbiased, as in grpo.
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.DualClipConfig):
    name: Literal["dapo"] = key("dapo", "Decoupled clip and dynamic sampling policy optimisation.")
    clip_ratio_high: float = key(0.28, "The policy ratio is clipped from above at 1 + clip_ratio_high.", ge=0)
    clip_ratio_c: float | None = key(10.0, "Dual clip: a negative advantage is weighted by at most this ratio.", gt=1)


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N], and mask out groups whose scores are all equal. Four calls of sum_over_ranks."""
    batch = reward_shaping.charge_kl(batch, config)
    idle = groups.all_equal(batch.scores, batch, sum_over_ranks)
    batch = batch.with_(loss_mask=torch.where(idle[batch.sequence_ids], 0.0, batch.loss_mask))
    rewards = reward_shaping.sequence_rewards(batch, batch.scores, kl_coef)
    advantages = groups.normalised(rewards, batch, sum_over_ranks).to(batch.loss_mask.dtype)
    return batch.with_(advantages=sequences.spread(advantages, batch))


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] token weights of one mini-batch: 1 / T."""
    return aggregation.token_weights(batch, "token-mean", sum_over_ranks=sum_over_ranks)


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
