"""CISPO: clip the importance weight, not the gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    L = -sg[clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high)] * A * logprob           (sg: no gradient)

so that a token whose ratio w is clipped still learns, with a bounded weight. A is GRPO's.

Assumptions, and what is done where systems differ:
- Both bounds are relative to 1, as in the paper, verl, slime and NeMo-RL. TRL clips from above only and its
  epsilon_high is absolute: its 5.0 is clip_ratio_low=1, clip_ratio_high=4 here.
- The paper leaves the lower bound open and tunes the upper one: set clip_ratio_low=1 for that. Defaults are verl's.
- policy/clipfrac_avg counts tokens whose weight was clipped, on either side, whatever the advantage's sign.
"""

from typing import Literal

import torch

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.ClipConfig, aggregation.AggregationConfig):
    name: Literal["cispo"] = key("cispo", "Clipped importance-sampling-weight policy optimisation.")


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=True)


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
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N] and entropy [N]."""
    ratio = policy_ratio.ratios(policy_ratio.log_ratios(logprobs, batch)).detach()
    clipped = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss = -clipped * batch.advantages * sequences.written(logprobs, batch)
    metrics = policy_ratio.ratio_metrics(ratio) | {"policy/clipfrac_avg": (clipped != ratio).to(loss.dtype)}
    return policy_loss.finish(loss, metrics, logprobs, entropy, batch, config, full_kl)
