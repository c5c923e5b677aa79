"""Statistics of the completions of one prompt, wherever the ranks hold them.

`values` are one number per sequence [B]; groups may be of unequal sizes and be spread over ranks. Their statistics are
sums over all ranks in float64.
"""

import torch

from megarl.algorithms.interface import SumOverRanks, identity
from megarl.types import Batch

_STD_EPS = 1e-6


def _totals(values: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks) -> tuple[torch.Tensor, torch.Tensor]:
    """(sizes, sums) of all groups, [num_groups] float64 each."""
    zeros = torch.zeros(batch.num_groups, dtype=torch.float64, device=values.device)
    sizes = zeros.index_add(0, batch.group_ids, torch.ones_like(values, dtype=torch.float64))
    sums = zeros.index_add(0, batch.group_ids, values.double())
    sizes, sums = sum_over_ranks(torch.stack([sizes, sums]))
    return sizes, sums


def centred(values: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[B] float64: value - mean of its group. A group of one has nothing to compare with and keeps its value (verl).

    One call of sum_over_ranks.
    """
    sizes, sums = _totals(values, batch, sum_over_ranks)
    means = torch.where(sizes == 1, 0.0, sums / sizes)
    return values.double() - means[batch.group_ids]


def normalised(values: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[B] float64: (value - mean of its group) / (standard deviation + 1e-6), the unbiased one (divisor n - 1).

    A group of one has mean 0 and standard deviation 1, so it keeps its value (verl). Two calls of sum_over_ranks.
    """
    sizes, sums = _totals(values, batch, sum_over_ranks)
    alone = sizes == 1
    means = torch.where(alone, 0.0, sums / sizes)
    centred = values.double() - means[batch.group_ids]
    squares = sum_over_ranks(torch.zeros_like(sizes).index_add(0, batch.group_ids, centred.square()))
    stds = torch.where(alone, 1.0, (squares / (sizes - 1)).sqrt())
    return centred / (stds[batch.group_ids] + _STD_EPS)


def others_mean(values: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[B] float64: the mean of the other values of its group; of a group of one its own value, so that nothing is left.

    One call of sum_over_ranks.
    """
    sizes, sums = _totals(values, batch, sum_over_ranks)
    sizes, sums = sizes[batch.group_ids], sums[batch.group_ids]
    return torch.where(sizes == 1, values.double(), (sums - values.double()) / (sizes - 1))


def all_equal(values: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[B] bool: whether all values of its group are the same, to float64's rounding. Two calls of sum_over_ranks."""
    sizes, sums = _totals(values, batch, sum_over_ranks)
    means = (sums / sizes)[batch.group_ids]
    off = (values.double() - means).abs() > 1e-9 * means.abs()
    return sum_over_ranks(torch.zeros_like(sizes).index_add(0, batch.group_ids, off.double()))[batch.group_ids] == 0
