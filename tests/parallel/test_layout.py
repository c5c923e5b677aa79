"""Ranks get their places, and a launcher that started too many or too few is refused."""

import pytest
import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.parallel import layout as layouts
from megarl.parallel.collectives import broadcast_from_first, max_over_ranks, sum_over
from megarl.parallel.coordinates import ParallelSizes
from tests.parallel_utils import run_ranks

LAYOUTS = {
    "tp2 pp2": dict(tp=2, pp=2),
    "tp2 dp2": dict(tp=2),
    "ep2 etp2": dict(ep=2, etp=2),
    "tp2 ep2": dict(tp=2, ep=2),
    "tp2 etp2": dict(tp=2, etp=2),
    "pp2 ep2": dict(pp=2, ep=2),
    "pp2 vpp2": dict(pp=2, vpp=2),
}
GROUPS = dict(tp="tp", pp="pp", dp="dp", ep="ep", etp="expt_tp", edp="expt_dp")


def _groups() -> dict[str, dict[str, list[int]]]:
    found = {}
    for name, sizes in LAYOUTS.items():
        layout = layouts.join(ParallelSizes(4, **sizes), sequence_parallel=False, seed=0)
        groups = layout.groups
        found[name] = {axis: dist.get_process_group_ranks(getattr(groups, GROUPS[axis])) for axis in GROUPS}
        at = layout.coordinates
        for axis, group in GROUPS.items():
            assert getattr(groups, group).rank() == getattr(at, axis), (name, axis, at)
    return found


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


def _places_and_groups() -> tuple[dict, dict]:
    return _places(2), _groups()


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(_places_and_groups, 4)


def test_groups_of_four_ranks(four_ranks):
    ranks = [places for places, _ in four_ranks]
    assert [r["tp_rank"] for r in ranks] == [0, 1, 0, 1]
    assert [r["dp_rank"] for r in ranks] == [0, 0, 1, 1]
    assert [r["tp_ranks"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp_ranks"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp_sum"] for r in ranks] == [2.0, 4.0, 2.0, 4.0]
    assert [r["untouched"] for r in ranks] == [0.0, 1.0, 2.0, 3.0]
    assert all(r["largest"] == 3.0 and r["received"] == [3, 1, 4] for r in ranks)


def test_coordinates_are_those_of_megatrons_groups(four_ranks):
    """Ranks of one Megatron group differ in its axis alone, and stand in its order."""
    dense, expert = ("tp", "pp", "dp"), ("etp", "ep", "edp", "pp")
    for rank, (_, found) in enumerate(four_ranks):
        for name, axes in found.items():
            sizes = ParallelSizes(4, **LAYOUTS[name])
            for axis, group in axes.items():
                others = [a for a in (expert if axis in ("etp", "ep", "edp") else dense) if a != axis]
                here = sizes.of(rank)
                expected = [r for r in range(4) if all(getattr(sizes.of(r), a) == getattr(here, a) for a in others)]
                assert group == expected, (name, axis, rank)
                assert [getattr(sizes.of(r), axis) for r in group] == list(range(len(group))), (name, axis)


def test_wrong_world_size_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="started 3 trainer processes, but the configuration needs 2"):
        layouts.check_world_size(2, ParallelConfig(tensor_model_parallel_size=2))
