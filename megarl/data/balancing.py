"""Sequences over data-parallel ranks, so that each has about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split the indices of `lengths` into `parts` lists with about equal sums; counts may differ.

    Longest first, each to the part with the least so far (Graham 1969, "Bounds on multiprocessing timing anomalies"):
    sums of two parts differ by at most the longest length, and the largest is at most 4/3 of the best possible. No part
    is empty when there are at least `parts` sequences. Deterministic; indices ascend within a part.

    Example: partition([5, 1, 4, 2], 2) -> [[0, 1], [2, 3]]
    """
    assert parts > 0
    chosen: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]  # (tokens, sequences, part); a heap
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, part = lightest[0]
        chosen[part].append(index)
        heapq.heapreplace(lightest, (tokens + int(lengths[index]), count + 1, part))
    return [sorted(indices) for indices in chosen]
