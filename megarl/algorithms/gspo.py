"""GSPO: the ratio of a whole sequence, not of a token, is clipped (Zheng et al., arXiv 2507.18071).

For a sequence with n written tokens, the length-normalised ratio (eq. 7) and GRPO's advantage (eq. 6):

    s_b = exp(1/n sum_t (logprob_t - old logprob_t))
    L_b = -min(s_b A_b, clip(s_b, 1 - clip_ratio_low, 1 + clip_ratio_high) A_b)

Each token carries L_b, with s_t = sg[s_b] * exp(logprob_t - sg[logprob_t]) (eq. 14, GSPO-token, sg: no gradient): under
seq-mean-token-mean its value is s_b's and its gradient the sequence ratio's own, (s_b A_b / n) grad sum_t logprob_t.

Assumptions, and what is done where systems differ:
- Other loss_agg_mode are honoured (verl 0.9.1), and are then not the paper's; verl 0.8 forced seq-mean-token-mean.
- The logarithm of s is clamped to at most 10 (verl). No dual clip. Clips: the paper's, 3e-4 and 4e-4.
- Advantages: as in grpo.
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.ClipConfig, aggregation.AggregationConfig):
    name: Literal["gspo"] = key("gspo", "Group sequence policy optimisation.")
    clip_ratio_low: float = key(3e-4, "The sequence ratio is clipped from below at 1 - clip_ratio_low.", ge=0, le=1)
    clip_ratio_high: float = key(4e-4, "The sequence ratio is clipped from above at 1 + clip_ratio_high.", ge=0)
    loss_agg_mode: aggregation.LossAggMode = key(
        "seq-mean-token-mean", "How token losses become one number; the paper's is seq-mean-token-mean."
    )


def needs(config: Config) -> Needs:
    return policy_loss.needs(config)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]: the sequence's on written tokens, 0 elsewhere. Two calls of sum_over_ranks."""
    batch = reward_shaping.charge_kl(batch, config)
    rewards = reward_shaping.sequence_rewards(batch, batch.scores, kl_coef)
    advantages = groups.normalised(rewards, batch, sum_over_ranks).to(batch.loss_mask.dtype)
    return batch.with_(advantages=sequences.spread(advantages, batch))


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
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N] and entropy [N]; sequences are whole."""
    log_ratios = policy_ratio.log_ratios(logprobs, batch)
    means = sequences.sums(log_ratios.detach(), batch) / sequences.counts(batch).clamp(min=1)
    own = log_ratios - log_ratios.detach()  # 0, with the gradient of the token's log-prob
    ratio = (sequences.spread(means, batch) + own).clamp(max=10.0).exp()
    loss, metrics = policy_ratio.clipped_loss(ratio, batch, config.clip_ratio_low, config.clip_ratio_high)
    return policy_loss.finish(loss, metrics, logprobs, entropy, batch, config, full_kl)
