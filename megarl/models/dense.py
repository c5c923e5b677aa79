"""What the dense pre-norm families with RoPE, GQA and a gated SiLU MLP have in common: Llama, Qwen2 and their kin."""

import torch.nn.functional as F
from transformers import PretrainedConfig

from megarl.models.weights import Copy, Entry, FusedQKV, GateUp, Vocabulary, WeightTable

BLOCK, MEGATRON = "model.layers.{i}", "decoder.layers.{i}"


def head_dim(hf: PretrainedConfig) -> int:
    """Size of one attention head; older configs leave it to hidden_size / num_attention_heads."""
    return hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads


def check(hf: PretrainedConfig) -> None:
    """Refuse what these families do not have in Megatron.

    Raises:
        ValueError: names the key of config.json and what is supported.
    """
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={hf.hidden_act!r} in config.json is not supported for {hf.model_type}; only silu")


def transformer_fields(hf: PretrainedConfig) -> dict:
    """Fields of Megatron's TransformerConfig that follow from config.json."""
    return dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=hf.attention_dropout,
        hidden_dropout=0.0,
        init_method_std=hf.initializer_range,
    )


def attention_entries(qkv_bias: bool = False, qk_norm: bool = False) -> tuple[Entry, ...]:
    """The tensors of a layer up to its MLP."""
    qkv = [f"{BLOCK}.self_attn.{x}_proj" for x in "qkv"]
    entries = [
        Copy(
            f"{BLOCK}.input_layernorm.weight",
            (f"{MEGATRON}.input_layernorm.weight", f"{MEGATRON}.self_attention.linear_qkv.layer_norm_weight"),
        ),
        FusedQKV(*(f"{x}.weight" for x in qkv), megatron=f"{MEGATRON}.self_attention.linear_qkv.weight"),
        Copy(f"{BLOCK}.self_attn.o_proj.weight", f"{MEGATRON}.self_attention.linear_proj.weight", split=1),
    ]
    if qkv_bias:
        entries.append(FusedQKV(*(f"{x}.bias" for x in qkv), megatron=f"{MEGATRON}.self_attention.linear_qkv.bias"))
    if qk_norm:
        entries += [
            Copy(f"{BLOCK}.self_attn.{x}_norm.weight", f"{MEGATRON}.self_attention.{x}_layernorm.weight") for x in "qk"
        ]
    return tuple(entries)


def mlp_entries() -> tuple[Entry, ...]:
    """The tensors of a layer's gated MLP, its norm included."""
    return (
        Copy(
            f"{BLOCK}.post_attention_layernorm.weight",
            (f"{MEGATRON}.pre_mlp_layernorm.weight", f"{MEGATRON}.mlp.linear_fc1.layer_norm_weight"),
        ),
        GateUp(f"{BLOCK}.mlp.gate_proj.weight", f"{BLOCK}.mlp.up_proj.weight", f"{MEGATRON}.mlp.linear_fc1.weight"),
        Copy(f"{BLOCK}.mlp.down_proj.weight", f"{MEGATRON}.mlp.linear_fc2.weight", split=1),
    )


def table(hf: PretrainedConfig, layers: tuple[tuple[Entry, ...], ...], num_experts: int = 0) -> WeightTable:
    """The checkpoint's tensors around these layers; `lm_head` only where it is not tied to the embedding."""
    embedding, head = "model.embed_tokens.weight", "output_layer.weight"
    last: tuple[Entry, ...] = (Copy("model.norm.weight", "decoder.final_layernorm.weight"),)
    if not hf.tie_word_embeddings:
        last += (Vocabulary("lm_head.weight", head),)
    return WeightTable(
        first=(Vocabulary(embedding, "embedding.word_embeddings.weight"),),
        layers=layers,
        last=last,
        tied_head=Vocabulary(embedding, head) if hf.tie_word_embeddings else None,
        num_query_groups=hf.num_key_value_heads,
        heads_per_group=hf.num_attention_heads // hf.num_key_value_heads,
        head_dim=head_dim(hf),
        num_experts=num_experts,
    )


def weight_table(hf: PretrainedConfig, qkv_bias: bool = False, qk_norm: bool = False) -> WeightTable:
    """The table of a model whose layers are all dense."""
    return table(hf, (attention_entries(qkv_bias, qk_norm) + mlp_entries(),) * hf.num_hidden_layers)
