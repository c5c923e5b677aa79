"""Whitening over the whole batch, all ranks together: subtract the mean, divide by the standard deviation.

    y = (x - mean) / sqrt(var + 1e-8)           and + mean again with shift_mean=False

var is the unbiased one (divisor n - 1), as in verl, TRL and slime; OpenRLHF and NeMo-RL's REINFORCE++ divide by n, a
relative difference of 1 / (2n). One value alone has variance 0.
"""

import torch

from megarl.algorithms.interface import SumOverRanks, identity

_VAR_EPS = 1e-8


def moments(
    values: torch.Tensor, mask: torch.Tensor, sum_over_ranks: SumOverRanks = identity
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, unbiased variance) [] float64 of values [n] where mask [n] is 1. Two calls of sum_over_ranks."""
    values, kept = values.double(), mask > 0
    count, total = sum_over_ranks(torch.stack([kept.double().sum(), values[kept].sum()]))
    mean = total / count.clamp(min=1)
    squares = sum_over_ranks((values[kept] - mean).square().sum())
    return mean, squares / (count - 1).clamp(min=1)


def whiten(
    values: torch.Tensor, mask: torch.Tensor, sum_over_ranks: SumOverRanks = identity, shift_mean: bool = True
) -> torch.Tensor:
    """[n] float64, whitened where mask [n] is 1, 0 elsewhere. Two calls of sum_over_ranks."""
    mean, variance = moments(values, mask, sum_over_ranks)
    whitened = (values.double() - mean) * torch.rsqrt(variance + _VAR_EPS)
    return torch.where(mask > 0, whitened if shift_mean else whitened + mean, 0.0)
