"""Llama 2, 3, 3.1, 3.2: dense, no biases, RoPE with the scaling of config.json."""

from transformers import PretrainedConfig

from megarl.models import dense
from megarl.models.weights import WeightTable


def check(hf: PretrainedConfig) -> None:
    """Raises ValueError for a Llama config with what Megatron's layers do not do."""
    dense.check(hf)
    for name in ("attention_bias", "mlp_bias"):
        if hf.to_dict()[name]:
            raise ValueError(f"{name}=true in config.json is not supported for llama; only false")


def transformer_fields(hf: PretrainedConfig) -> dict:
    """Fields of Megatron's TransformerConfig."""
    return dense.transformer_fields(hf) | dict(add_qkv_bias=False)


def weight_table(hf: PretrainedConfig) -> WeightTable:
    """Where each checkpoint tensor lies."""
    return dense.weight_table(hf)
