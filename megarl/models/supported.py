"""Whether a model can be built under a layout, from its config.json alone; without Megatron, so that it is quick."""

from importlib.util import find_spec

from transformers import PretrainedConfig

from megarl import models
from megarl.parallel.coordinates import ParallelSizes

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check(hf: PretrainedConfig, sizes: ParallelSizes, transformer_impl: str = "auto") -> None:
    """Refuse a model that cannot be built under this layout, before any process is started.

    Raises:
        ValueError: unknown family; heads, KV heads or MLP not divisible by the tensor-parallel size, experts by the
            expert-parallel size or their width by the expert-tensor-parallel size; layers that the pipeline's stages
            cannot share; expert parallelism without experts; unknown RoPE type; TransformerEngine asked for and not
            installed.
    """
    family = models.get(hf.model_type)
    family.check(hf)
    fields = family.transformer_fields(hf)
    by_tp = dict(num_attention_heads=hf.num_attention_heads, num_key_value_heads=hf.num_key_value_heads)
    if not all(fields.get("moe_layer_freq", [0])):
        by_tp["intermediate_size"] = hf.intermediate_size
    _check_divides("parallel.tensor_model_parallel_size", sizes.tp, by_tp)
    if "num_moe_experts" in fields:
        _check_divides("expert_model_parallel_size", sizes.ep, dict(num_experts=hf.num_experts))
        width = dict(moe_intermediate_size=hf.moe_intermediate_size)
        _check_divides("expert_tensor_parallel_size", sizes.etp, width)
    elif (sizes.ep, sizes.etp) != (1, 1):
        raise ValueError(
            f"expert_model_parallel_size={sizes.ep} and expert_tensor_parallel_size={sizes.etp}, but {hf.model_type} "
            "has no experts; set both to 1"
        )
    sizes.stage_layers(hf.num_hidden_layers)
    rope_type = hf.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} in config.json is not supported; supported: {', '.join(ROPE_TYPES)}")
    if transformer_impl == "te" and find_spec("transformer_engine") is None:
        raise ValueError("actor.model.transformer_impl=te, but transformer_engine is not installed; use local or auto")


def check_training(hf: PretrainedConfig, sizes: ParallelSizes, sequence_parallel: bool) -> None:
    """Refuse what Megatron-core builds but does not train.

    Raises:
        ValueError: experts under tensor parallelism without sequence parallelism.
    """
    if "num_moe_experts" in models.get(hf.model_type).transformer_fields(hf) and sizes.tp > 1 and not sequence_parallel:
        raise ValueError(
            f"parallel.tensor_model_parallel_size={sizes.tp} with a model that has experts ({hf.model_type}) needs "
            "parallel.sequence_parallel=true"
        )


def _check_divides(key: str, size: int, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if count % size:
            fitting = [str(n) for n in range(1, count + 1) if all(c % n == 0 for c in counts.values())]
            raise ValueError(
                f"{key}={size} does not divide the model's {name}={count}; sizes that fit this model: "
                f"{', '.join(fitting)}"
            )


def check_engine(hf: PretrainedConfig, tensor_parallel_size: int, longest_sequence: int) -> None:
    """Refuse what every vLLM engine would refuse of this model, half a minute before it would.

    Raises:
        ValueError: heads not divisible by the engine's tensor-parallel size; sequences over the model's positions.
    """
    if hf.num_attention_heads % tensor_parallel_size:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel_size} does not divide the model's "
            f"num_attention_heads={hf.num_attention_heads}"
        )
    # A scaled RoPE reaches further than this number, by rules of the engine's own.
    if hf.rope_parameters["rope_type"] == "default" and longest_sequence > hf.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_length + data.max_response_length = {longest_sequence} tokens, but the model has "
            f"max_position_embeddings={hf.max_position_embeddings}; shorten one of them"
        )
