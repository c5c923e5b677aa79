"""A model that cannot be built under a layout is refused from its config.json, with the key and what would fit."""

import pytest
from transformers import Qwen3Config

from megarl.models import supported
from megarl.parallel.coordinates import ParallelSizes
from tests import tiny_models


def _moe(**changes):
    return tiny_models.CONFIGS["qwen3_moe"]().__class__(**tiny_models.MOE | dict(norm_topk_prob=True) | changes)


def _qwen3(**changes):
    return Qwen3Config(**tiny_models.DEEP | changes)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_every_tiny_model_is_supported(name):
    supported.check(tiny_models.CONFIGS[name](), ParallelSizes(4, tp=2, pp=2))


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (
            _qwen3,
            dict(tp=4),
            "tensor_model_parallel_size=4 does not divide the model's num_key_value_heads=2; .*: 1, 2$",
        ),
        (_qwen3, dict(pp=3), r"4 layers cannot be shared by pp=3 stages"),
        (_qwen3, dict(pp=2, vpp=4), r"4 layers cannot be shared by pp=2 stages of vpp=4 equal chunks"),
        (_qwen3, dict(ep=2), "expert_model_parallel_size=2 .* qwen3 has no experts; set both to 1"),
        (_qwen3, dict(etp=2), "expert_tensor_parallel_size=2, but qwen3 has no experts"),
        (_moe, dict(ep=3), "expert_model_parallel_size=3 does not divide the model's num_experts=4; .*: 1, 2, 4$"),
        (_moe, dict(etp=5), "expert_tensor_parallel_size=5 does not divide the model's moe_intermediate_size=24"),
    ],
)
def test_layouts_that_do_not_fit_the_model(config, sizes, message):
    with pytest.raises(ValueError, match=message):
        supported.check(config(), ParallelSizes(60, **sizes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_qwen3(attention_bias=True), "attention_bias=true in config.json is not supported for qwen3"),
        (_moe(attention_bias=True), "attention_bias=true in config.json is not supported for qwen3_moe"),
        (_moe(use_sliding_window=True), "use_sliding_window=true in config.json is not supported"),
        (_moe(num_experts_per_tok=5), r"num_experts_per_tok=5 in config.json must be in 1..num_experts=4"),
        (_moe(num_experts_per_tok=1), "norm_topk_prob=true with num_experts_per_tok=1 .* set norm_topk_prob=false"),
        (_moe(mlp_only_layers=[0, 1, 2, 3]), "no layer has experts"),
        (_moe(decoder_sparse_step=5), "no layer has experts"),
        (_moe(hidden_act="gelu"), "hidden_act='gelu' in config.json is not supported for qwen3_moe; only silu"),
    ],
)
def test_models_that_megatron_does_not_do(config, message):
    with pytest.raises(ValueError, match=message):
        supported.check(config, ParallelSizes(1))


def test_the_mlp_of_a_model_without_dense_layers_need_not_be_cut():
    supported.check(_moe(intermediate_size=97), ParallelSizes(2, tp=2))
    with pytest.raises(ValueError, match="intermediate_size=97"):
        supported.check(_moe(intermediate_size=97, mlp_only_layers=[1]), ParallelSizes(2, tp=2))


def test_experts_are_trained_under_tensor_parallelism_only_with_sequence_parallelism():
    supported.check_training(_moe(), ParallelSizes(2), sequence_parallel=False)
    supported.check_training(_moe(), ParallelSizes(2, tp=2), sequence_parallel=True)
    supported.check_training(_qwen3(), ParallelSizes(2, tp=2), sequence_parallel=False)
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2 .* needs parallel.sequence_parallel=true"):
        supported.check_training(_moe(), ParallelSizes(2, tp=2), sequence_parallel=False)
