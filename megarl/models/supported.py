"""Whether a model can be built under a layout, from its config.json alone; without Megatron, so that it is quick."""

from importlib.util import find_spec

from transformers import PretrainedConfig

from megarl import models

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check(hf: PretrainedConfig, tensor_model_parallel_size: int, transformer_impl: str = "auto") -> None:
    """Refuse a model that cannot be built under this layout, before any process is started.

    Raises:
        ValueError: unknown family; heads, KV heads or MLP not divisible by the tensor-parallel size; unknown RoPE type;
            TransformerEngine asked for and not installed.
    """
    models.get(hf.model_type).check(hf)
    counts = dict(
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        intermediate_size=hf.intermediate_size,
    )
    for name, count in counts.items():
        if count % tensor_model_parallel_size:
            fitting = [str(n) for n in range(1, count + 1) if all(c % n == 0 for c in counts.values())]
            raise ValueError(
                f"parallel.tensor_model_parallel_size={tensor_model_parallel_size} does not divide the model's "
                f"{name}={count}; sizes that fit this model: {', '.join(fitting)}"
            )
    rope_type = hf.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} in config.json is not supported; supported: {', '.join(ROPE_TYPES)}")
    if transformer_impl == "te" and find_spec("transformer_engine") is None:
        raise ValueError("actor.model.transformer_impl=te, but transformer_engine is not installed; use local or auto")


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
