"""Qwen3: dense, an RMSNorm on each query and key head, no biases."""

from transformers import PretrainedConfig

from megarl.models import dense
from megarl.models.weights import WeightTable


def check(hf: PretrainedConfig) -> None:
    """Raises ValueError for a Qwen3 config with what Megatron's layers do not do."""
    dense.check(hf)
    if hf.attention_bias:
        raise ValueError(f"attention_bias=true in config.json is not supported for {hf.model_type}; only false")
    if hf.use_sliding_window:
        raise ValueError("use_sliding_window=true in config.json is not supported; set it to false (full attention)")


def transformer_fields(hf: PretrainedConfig) -> dict:
    """Fields of Megatron's TransformerConfig."""
    return dense.transformer_fields(hf) | dict(add_qkv_bias=False, qk_layernorm=True)


def weight_table(hf: PretrainedConfig) -> WeightTable:
    """Where each checkpoint tensor lies."""
    return dense.weight_table(hf, qk_norm=True)
