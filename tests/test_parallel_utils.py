"""run_ranks: results in rank order; a rank's failure is shown and leaves nobody waiting."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.parallel_utils import RankError, run_ranks


def _sum_of_ranks(offset):
    total = torch.tensor([offset + dist.get_rank()])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "pid": os.getpid()}


def _fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def test_results_come_in_rank_order():
    results = run_ranks(_sum_of_ranks, 2, 10)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(result["total"].item() == 21 for result in results)
    assert len({result["pid"] for result in results} | {os.getpid()}) == 3


def test_a_failing_rank_is_shown_first_and_ends_the_others():
    with pytest.raises(RankError, match="_fail_on_rank_1: rank 1: Traceback(?s:.*)ValueError: rank 1 has had enough"):
        run_ranks(_fail_on_rank_1, 2, timeout_seconds=60)
