"""GRPO: a group of completions of one prompt is its own baseline (DeepSeekMath, arXiv 2402.03300).

For completion b of prompt g with reward R_b, mean mu_g and standard deviation sigma_g of its group's rewards, every
token that the policy wrote has the advantage

    A_b = (R_b - mu_g) / (sigma_g + 1e-6)

and, with the ratio w = exp(logprob - old logprob), the loss

    L = -min(w A, clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high) A) + kl_loss_coef * KL - entropy_coeff * entropy

weighted over the mini-batch by loss_agg_mode. Example: scores 1, 0, 2 have mean 1 and standard deviation 1, so the
advantages are 0, -1, +1 (to 1e-6).

Assumptions, and what is done where systems differ:
- sigma is the unbiased one (divisor n - 1) with epsilon 1e-6, as in verl, slime and NeMo-RL; TRL's epsilon is 1e-4,
  OpenRLHF's 1e-9. A population standard deviation would give 0, -1.22, +1.22 in the example.
- A group of one has nothing to be compared with: mean 0 and standard deviation 1 (verl): its reward is its advantage.
- A group whose rewards are all equal has advantage 0 everywhere: it has no policy gradient, only KL and entropy terms.
- Groups may be spread over ranks and be of unequal sizes: their statistics are sums over all ranks, in float64.
- R is the score; with use_kl_in_reward less kl_coef times the sum of the completion's KL (verl).
- The paper has no dual clip; verl's is on for every algorithm, and so it is here (policy_ratio.py; null turns it off).
- The old log-probs are the policy's before the first mini-batch of the step, not the engine's.
- Advantages that are not divided by sigma are Dr. GRPO's, a file of its own: norm_adv_by_std_in_grpo=false is refused
  with that advice.
"""

from typing import Literal

import torch
from pydantic import field_validator

from megarl.algorithms import aggregation, groups, policy_loss, policy_ratio, reward_shaping, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.DualClipConfig, aggregation.AggregationConfig):
    name: Literal["grpo"] = key("grpo", "Group-relative policy optimisation.")
    norm_adv_by_std_in_grpo: bool = key(
        True, "verl's key; only true: advantages are divided by the group's standard deviation. See dr_grpo."
    )

    @field_validator("norm_adv_by_std_in_grpo")
    @classmethod
    def _without_std_is_dr_grpo(cls, norm: bool) -> bool:
        if not norm:
            raise ValueError(
                "advantages without the group's standard deviation are Dr. GRPO's: set algorithm.name=dr_grpo and "
                "algorithm.loss_scale_factor (usually data.max_response_length), and remove this key"
            )
        return norm


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
    ratio = policy_ratio.ratios(policy_ratio.log_ratios(logprobs, batch))
    loss, metrics = policy_ratio.clipped_loss(
        ratio, batch, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    )
    return policy_loss.finish(loss, metrics, logprobs, entropy, batch, config, full_kl)
