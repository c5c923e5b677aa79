"""The clipped surrogate of PPO (Schulman et al., arXiv 1707.06347, eq. 7) with the dual clip of Ye et al. (1912.09729).

With the ratio w of the current policy to the one before the update, and an advantage A:

    L = max(-w A, -clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high) A)
    L = min(L, -clip_ratio_c A)                where A < 0: bounds the loss of a bad token that became likely

The log-ratio is clamped to [-20, 20] before the exponential (verl, OpenRLHF); slime, NeMo-RL and TRL do not. TRL's
`delta` is clip_ratio_c under another name.
"""

import torch

from megarl.algorithms.sequences import written
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch

_MAX_LOG_RATIO = 20.0

Metrics = dict[str, torch.Tensor]


class ClipConfig(AlgorithmConfig):
    clip_ratio_low: float = key(0.2, "The policy ratio is clipped from below at 1 - clip_ratio_low.", ge=0, le=1)
    clip_ratio_high: float = key(
        0.2, "The policy ratio is clipped from above at 1 + clip_ratio_high. DAPO's clip-higher uses 0.28.", ge=0
    )


class DualClipConfig(ClipConfig):
    clip_ratio_c: float | None = key(
        3.0, "Dual clip: a negative advantage is weighted by at most this ratio; null turns it off.", gt=1
    )


def log_ratios(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] logprobs - batch.logprobs; 0, without a gradient, on tokens that were not written."""
    return written(logprobs, batch) - written(batch.logprobs, batch)


def ratios(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_loss(
    ratio: torch.Tensor, batch: Batch, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, Metrics]:
    """(L [N], metrics [N]) of ratios [N] and batch.advantages. See metrics.py for val/ratio_spread."""
    unclipped = -ratio * batch.advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * batch.advantages
    loss = torch.maximum(unclipped, clipped)
    metrics = ratio_metrics(ratio) | {"policy/clipfrac_avg": (clipped > unclipped).to(loss.dtype)}
    if dual is not None:
        bound = -dual * batch.advantages
        bounded = (batch.advantages < 0) & (loss > bound)
        metrics["policy/pg_clipfrac_lower"] = bounded.to(loss.dtype)
        loss = torch.where(bounded, bound, loss)
    return loss, metrics


def ratio_metrics(ratio: torch.Tensor) -> Metrics:
    return {"val/ratio": ratio, "val/ratio_spread": (ratio - 1.0).square()}
