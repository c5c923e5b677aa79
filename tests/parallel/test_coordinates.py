"""Coordinates are Megatron's own: its groups on real ranks, and its arithmetic for layers."""

import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.parallel import layout as layouts
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


def test_groups_of_real_ranks():
    """Ranks of one Megatron group differ in its axis alone, and stand in its order."""
    dense, expert = ("tp", "pp", "dp"), ("etp", "ep", "edp", "pp")
    for rank, found in enumerate(run_ranks(_groups, 4)):
        for name, axes in found.items():
            sizes = ParallelSizes(4, **LAYOUTS[name])
            for axis, group in axes.items():
                others = [a for a in (expert if axis in ("etp", "ep", "edp") else dense) if a != axis]
                here = sizes.of(rank)
                expected = [r for r in range(4) if all(getattr(sizes.of(r), a) == getattr(here, a) for a in others)]
                assert group == expected, (name, axis, rank)
                assert [getattr(sizes.of(r), axis) for r in group] == list(range(len(group))), (name, axis)


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(2, 4),
    vpp=st.integers(1, 3),
    per_chunk=st.integers(1, 2),
    first=st.none() | st.integers(1, 2),
    last=st.none() | st.integers(1, 2),
)
def test_layers_are_those_that_megatron_builds(pp, vpp, per_chunk, first, last):
    assume(pp > 2 or vpp == 1 or None in (first, last))  # else Megatron divides by its number of middle stages, zero
    first, last = (None if n is None else n * vpp for n in (first, last))
    free = pp - (first is not None) - (last is not None)
    num_layers = free * per_chunk * vpp + (first or 0) + (last or 0)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=float,
    )
    sizes = ParallelSizes(pp, pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    seen = []
    for chunk in range(vpp):
        for stage in range(pp):
            vp_stage = chunk if vpp > 1 else None
            start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
            assert sizes.layers(stage, chunk, num_layers) == range(start, start + count)
            seen += range(start, start + count)
    assert seen == list(range(num_layers))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(world_size=6, tp=4), "6 ranks cannot be cut into groups of tp=4 x pp=1"),
        (dict(world_size=4, ep=2, etp=2, pp=2), "4 ranks cannot be cut into groups of etp=2 x ep=2 x pp=2"),
        (dict(world_size=4, ep=0), "ep=0 in a parallel layout must be at least 1"),
        (dict(world_size=4, vpp=2), "vpp=2 needs pipeline parallelism"),
        (dict(world_size=4, first_stage_layers=1), "need pipeline parallelism"),
    ],
)
def test_impossible_layouts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelSizes(**sizes)


@pytest.mark.parametrize(
    ("sizes", "num_layers"),
    [(dict(pp=2), 3), (dict(pp=2, vpp=2), 6), (dict(pp=4, first_stage_layers=1), 6), (dict(pp=4), 0)],
)
def test_layers_that_stages_cannot_share_are_refused(sizes, num_layers):
    with pytest.raises(ValueError, match=f"{num_layers} layers cannot be shared by pp="):
        ParallelSizes(4, **sizes).layers(0, 0, num_layers)
