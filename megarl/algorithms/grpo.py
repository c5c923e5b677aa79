"""GRPO: a group of completions of one prompt is its own baseline (DeepSeekMath, arXiv 2402.03300).

For completion b of prompt g with score R_b, mean mu_g and standard deviation sigma_g of its group's scores, every token
that the policy wrote has the advantage

    A_b = (R_b - mu_g) / (sigma_g + 1e-6)          or  R_b - mu_g  with norm_adv_by_std_in_grpo=false (Dr. GRPO)

and, with the ratio w = exp(logprob - old logprob), the loss

    L = -min(w A, clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high) A) + kl_loss_coef * KL - entropy_coeff * entropy

weighted over the mini-batch by loss_agg_mode. Example: scores 1, 0, 2 have mean 1 and standard deviation 1, so the
advantages are 0, -1, +1 (to 1e-6).

Assumptions, and what is done where systems differ:
- sigma is the unbiased one (divisor n - 1) with epsilon 1e-6, as in verl, slime and NeMo-RL; TRL's epsilon is 1e-4. A
  population standard deviation would give 0, -1.22, +1.22 in the example.
- A group of one has nothing to be compared with: mean 0 and standard deviation 1 (verl), so its advantage is its score.
- A group whose scores are all equal has advantage 0 everywhere: it has no policy gradient, only KL and entropy terms.
- Groups may be spread over ranks and be of unequal sizes: their statistics are sums over all ranks, in float64.
- The log-ratio is clamped to [-20, 20] before the exponential (verl, OpenRLHF). No dual clip.
- The old log-probs are the policy's before the first mini-batch of the step, not the engine's.
"""

from typing import Literal

import torch
from pydantic import model_validator

from megarl.algorithms import aggregation, kl
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch

_STD_EPS = 1e-6
_MAX_LOG_RATIO = 20.0


class Config(AlgorithmConfig):
    name: Literal["grpo"] = key("grpo", "Group-relative policy optimisation.")
    clip_ratio_low: float = key(0.2, "The policy ratio is clipped from below at 1 - clip_ratio_low.", ge=0, le=1)
    clip_ratio_high: float = key(
        0.2, "The policy ratio is clipped from above at 1 + clip_ratio_high. DAPO's clip-higher uses 0.28.", ge=0
    )
    loss_agg_mode: aggregation.LossAggMode = key(
        "token-mean",
        "How token losses become one number: token-mean, seq-mean-token-sum, seq-mean-token-mean (the paper's), or "
        "seq-mean-token-sum-norm (Dr. GRPO's), over the whole mini-batch.",
    )
    loss_scale_factor: float | None = key(
        None, "Tokens that seq-mean-token-sum-norm divides a sequence's sum by, e.g. data.max_response_length.", gt=0
    )
    norm_adv_by_std_in_grpo: bool = key(
        True, "Divide advantages by the group's standard deviation; false is Dr. GRPO's."
    )
    use_kl_loss: bool = key(False, "Add the KL to the frozen reference to the loss; loads the reference.")
    kl_loss_coef: float = key(0.001, "Weight of that KL.", ge=0)
    kl_loss_type: kl.KLType = key("low_var_kl", "Its estimator: kl (k1), abs, mse (k2) or low_var_kl (k3).")
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus: positive values favour higher entropy.")

    @model_validator(mode="after")
    def _horizon_fits_the_mode(self):
        needs_horizon = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if needs_horizon and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor, the length in tokens that it divides "
                "by (usually data.max_response_length)"
            )
        if not needs_horizon and self.loss_scale_factor is not None:
            raise ValueError(
                f"loss_scale_factor={self.loss_scale_factor:g} has no meaning with loss_agg_mode={self.loss_agg_mode}; "
                "remove it, or set loss_agg_mode=seq-mean-token-sum-norm"
            )
        return self


def needs(config: Config) -> Needs:
    return Needs(reference=config.use_kl_loss)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> Batch:
    """Fill batch.advantages [N] float32 from batch.scores [B]: the sequence's on loss_mask tokens, 0 elsewhere.

    Calls sum_over_ranks twice, with [2, num_groups] and [num_groups].
    """
    scores = batch.scores.double()
    zeros = scores.new_zeros(batch.num_groups)
    sizes = zeros.index_add(0, batch.group_ids, torch.ones_like(scores))
    totals = zeros.index_add(0, batch.group_ids, scores)
    sizes, totals = sum_over_ranks(torch.stack([sizes, totals]))
    alone = sizes == 1
    means = torch.where(alone, 0.0, totals / sizes)
    centred = scores - means[batch.group_ids]
    squares = sum_over_ranks(zeros.index_add(0, batch.group_ids, centred.square()))
    if config.norm_adv_by_std_in_grpo:
        stds = torch.where(alone, 1.0, (squares / (sizes - 1)).sqrt())
        centred = centred / (stds[batch.group_ids] + _STD_EPS)
    return batch.with_(advantages=centred.float()[batch.sequence_ids] * batch.loss_mask)


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] float32 token weights of one mini-batch: aggregation.token_weights under loss_agg_mode."""
    return aggregation.token_weights(batch, config.loss_agg_mode, config.loss_scale_factor, sum_over_ranks)


def token_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch, config: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N] and entropy [N]; metrics carry no gradient.

    Uses batch.logprobs, advantages, loss_mask, and ref_logprobs with use_kl_loss. Where loss_mask is 0 the loss and
    every metric is 0.
    """
    written = batch.loss_mask > 0

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(written, values, 0.0)

    logprobs, entropy = masked(logprobs), masked(entropy)
    log_ratio = logprobs - masked(batch.logprobs)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    unclipped_loss = -ratio * batch.advantages
    clipped_loss = -clipped_ratio * batch.advantages
    loss = masked(torch.maximum(unclipped_loss, clipped_loss))
    metrics = {
        "policy/approxkl_avg": 0.5 * log_ratio.square(),
        "policy/clipfrac_avg": masked((clipped_loss > unclipped_loss).to(loss.dtype)),
        "policy/entropy_avg": entropy,
        "val/ratio": masked(ratio),
    }
    if config.use_kl_loss:
        divergence = kl.per_token(logprobs, masked(batch.ref_logprobs), config.kl_loss_type)
        metrics["objective/kl"] = divergence
        loss = loss + config.kl_loss_coef * divergence
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * entropy
    return loss, {name: values.detach() for name, values in metrics.items()}
