"""Importance sampling between the engine that sampled and the trainer that learns: TIS, and MIS (IcePop).

Engine and trainer compute slightly different log-probs under the same weights, so the samples are off-policy even
before the first update. rho_t = exp(logprob_t - rollout_logprob_t), from the trainer's policy before the update, weighs
the policy loss of each token; weights carry no gradient:

    truncate    min(rho, C)                          TIS  (Yao et al. 2025, "Your efficient RL framework secretly brings
                                                     you off-policy RL training"; verl, TRL)
    mask        rho where C_low <= rho <= C, else 0  MIS, IcePop  (Ling Team, arXiv 2510.18855; verl, TRL, NeMo-RL)

per token, or per `sequence` with rho = exp(sum_t log rho_t) on all of its tokens. log rho is clamped to [-20, 20]
(verl). OpenRLHF's `tis` clamps from below too, which is neither; verl's batch normalisation of the weights and its
thirteen rejection rules are not offered.
"""

from typing import Literal

import torch
from pydantic import model_validator

from megarl.algorithms import sequences
from megarl.algorithms.interface import SumOverRanks, identity
from megarl.config.base import Section, key
from megarl.types import Batch

_MAX_LOG_RATIO = 20.0


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "Weigh the policy loss by trainer over engine probability, per token or per sequence; null: not at all."
    )
    rollout_is_mode: Literal["truncate", "mask"] = key(
        "truncate", "Above rollout_is_threshold: truncate the weight to it (TIS), or mask it to 0 (MIS, IcePop)."
    )
    rollout_is_threshold: float = key(2.0, "The largest weight.", gt=0)
    rollout_is_lower: float | None = key(None, "mask only: weights below this are 0 as well.", ge=0)

    @model_validator(mode="after")
    def _bounds_fit_the_mode(self):
        low, high = self.rollout_is_lower, self.rollout_is_threshold
        if low is not None and self.rollout_is_mode != "mask":
            raise ValueError(
                f"rollout_is_lower={low:g} has no meaning with rollout_is_mode=truncate; remove it, or set "
                "rollout_is_mode=mask"
            )
        if low is not None and low >= high:
            raise ValueError(f"rollout_is_lower={low:g} must be less than rollout_is_threshold={high:g}")
        return self


def log_rho(batch: Batch) -> torch.Tensor:
    """[N] batch.logprobs - batch.rollout_logprobs, 0 on tokens that were not written."""
    return sequences.written(batch.logprobs, batch) - sequences.written(batch.rollout_logprobs, batch)


def weights(batch: Batch, config: RolloutCorrectionConfig) -> torch.Tensor:
    """[N] the weight of each written token, 0 elsewhere; no gradient. Sequences must be whole."""
    logs = log_rho(batch).detach()
    if config.rollout_is == "sequence":
        logs = sequences.spread(sequences.sums(logs, batch), batch)
    rho = logs.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if config.rollout_is_mode == "truncate":
        rho = rho.clamp(max=config.rollout_is_threshold)
    else:
        kept = (rho >= (config.rollout_is_lower or 0.0)) & (rho <= config.rollout_is_threshold)
        rho = torch.where(kept, rho, 0.0)
    return sequences.written(rho, batch)


def metrics(batch: Batch, config: RolloutCorrectionConfig, sum_over_ranks: SumOverRanks = identity) -> dict[str, float]:
    """How far engine and trainer are apart, with or without the correction. One call of sum_over_ranks.

    Means over all written tokens: rollout_corr/kl and /k3_kl estimate KL(engine || trainer) in nats, /chi2_token the
    mean of rho^2 less 1. With the correction also the mean weight, the share of tokens whose weight it changed, and the
    effective sample size (mean weight)^2 / mean(weight^2), 1 where all weights are equal.
    """
    written = batch.loss_mask > 0
    logs = log_rho(batch).double()[written].clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    columns = [torch.ones_like(logs), -logs, logs.exp() - 1.0 - logs, (2 * logs).exp() - 1.0]
    if config.rollout_is:
        weight = weights(batch, config).double()[written]
        raw = weights(batch, config.model_copy(update=_UNBOUNDED)).double()[written]
        columns += [weight, weight.square(), (weight != raw).double()]
    count, *sums = sum_over_ranks(torch.stack([column.sum() for column in columns])).tolist()
    means = [total / max(count, 1.0) for total in sums]
    found = dict(zip(["rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"], means, strict=False))
    if config.rollout_is:
        mean, square, changed = means[3:]
        found |= {
            "rollout_corr/is_mean": mean,
            "rollout_corr/is_eff_sample_size": mean**2 / square if square else 0.0,
            "rollout_corr/is_bounded_frac": changed,
        }
    return found


_UNBOUNDED = {"rollout_is_mode": "truncate", "rollout_is_threshold": float("inf"), "rollout_is_lower": None}
