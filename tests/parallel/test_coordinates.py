"""Layers are shared out as Megatron does it; test_layout.py compares coordinates with its groups on real ranks."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.parallel.coordinates import ParallelSizes


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
