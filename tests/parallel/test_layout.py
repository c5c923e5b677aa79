"""Ranks get their places, and a launcher that started too many or too few is refused."""

import pytest
import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.parallel import layout as layouts
from megarl.parallel.collectives import broadcast_from_first, max_over_ranks, sum_over
from tests.parallel_utils import run_ranks


def _places(tp: int) -> dict:
    layout = layouts.initialize(ParallelConfig(tensor_model_parallel_size=tp), seed=0)
    mine = torch.tensor([float(layout.rank)])
    given = torch.tensor([3, 1, 4]) if layout.is_first else None
    return dict(
        tp_rank=layout.tp_rank,
        dp_rank=layout.dp_rank,
        tp_ranks=dist.get_process_group_ranks(layout.groups.tp),
        dp_ranks=dist.get_process_group_ranks(layout.groups.dp),
        dp_sum=float(sum_over(layout.groups.dp)(mine)),
        untouched=float(mine),
        largest=float(max_over_ranks(mine[0])),
        received=broadcast_from_first(given, torch.int64).tolist(),
    )


def test_groups_of_four_ranks():
    ranks = run_ranks(_places, 4, 2)
    assert [r["tp_rank"] for r in ranks] == [0, 1, 0, 1]
    assert [r["dp_rank"] for r in ranks] == [0, 0, 1, 1]
    assert [r["tp_ranks"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp_ranks"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp_sum"] for r in ranks] == [2.0, 4.0, 2.0, 4.0]
    assert [r["untouched"] for r in ranks] == [0.0, 1.0, 2.0, 3.0]
    assert all(r["largest"] == 3.0 and r["received"] == [3, 1, 4] for r in ranks)


def test_wrong_world_size_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="started 3 trainer processes, but the configuration needs 2"):
        layouts.check_world_size(2, ParallelConfig(tensor_model_parallel_size=2))
