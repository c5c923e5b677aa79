"""Sequences into micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.balancing import partition


def pack(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Put every index of `lengths` into one of a few bins whose sums are at most `max_tokens`, and about equal.

    There are exactly max(min_bins, len(pack(lengths, max_tokens))) bins: data-parallel ranks agree on a number of
    micro-batches by taking the largest and packing again with it. Bins are empty only when there are fewer sequences
    than `min_bins`. At most as many bins as first-fit decreasing needs (11/9 of the best possible, plus one).
    Deterministic; indices ascend within a bin, and bins with the most tokens come first, so that memory peaks at once.

    Raises ValueError when one sequence is over the budget.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, over the micro-batch budget of {max_tokens}; raise "
                "the *_max_token_len_per_gpu key, or shorten the sequences"
            )
    bins = _fewest(lengths, max_tokens)
    if len(bins) < min_bins:
        balanced = partition(lengths, min_bins)
        bins = balanced if _fits(balanced, lengths, max_tokens) else _split(bins, min_bins)
    return sorted(bins, key=lambda indices: (-_sum(indices, lengths), indices))


def _fewest(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Balanced bins where they fit as tightly as first-fit decreasing's, else first-fit decreasing's."""
    first_fit = _first_fit_decreasing(lengths, max_tokens)
    lower_bound = max(1, -(-int(sum(lengths)) // max_tokens))
    for count in range(lower_bound, len(first_fit) + 1):
        balanced = partition(lengths, count)
        if _fits(balanced, lengths, max_tokens):
            return balanced
    return first_fit


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = int(lengths[index])
        place = next((place for place, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= length
    return [sorted(indices) for indices in bins]


def _split(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the fullest bins until there are `count`."""
    bins = [list(indices) for indices in bins]
    while len(bins) < count:
        fullest = max(bins, key=len, default=[])
        half = len(fullest) // 2
        bins.append(fullest[len(fullest) - half :])
        del fullest[len(fullest) - half :]
    return bins


def _fits(bins: list[list[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(_sum(indices, lengths) <= max_tokens for indices in bins)


def _sum(indices: list[int], lengths: Sequence[int]) -> int:
    return sum(int(lengths[index]) for index in indices)
