"""What the dense pre-norm families with RoPE, GQA and a gated SiLU MLP have in common: Llama, Qwen2 and their kin."""

import torch.nn.functional as F
from transformers import PretrainedConfig

from megarl.models.weights import Copy, FusedQKV, GateUp, Vocabulary, WeightTable


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


def weight_table(hf: PretrainedConfig, qkv_bias: bool) -> WeightTable:
    """The checkpoint's tensors; `lm_head` only where it is not tied to the embedding."""
    block, mcore = "model.layers.{i}", "decoder.layers.{i}"
    qkv = [f"{block}.self_attn.{x}_proj" for x in "qkv"]
    layer = [
        Copy(
            f"{block}.input_layernorm.weight",
            (f"{mcore}.input_layernorm.weight", f"{mcore}.self_attention.linear_qkv.layer_norm_weight"),
        ),
        FusedQKV(*(f"{x}.weight" for x in qkv), megatron=f"{mcore}.self_attention.linear_qkv.weight"),
        Copy(f"{block}.self_attn.o_proj.weight", f"{mcore}.self_attention.linear_proj.weight", split=1),
        Copy(
            f"{block}.post_attention_layernorm.weight",
            (f"{mcore}.pre_mlp_layernorm.weight", f"{mcore}.mlp.linear_fc1.layer_norm_weight"),
        ),
        GateUp(f"{block}.mlp.gate_proj.weight", f"{block}.mlp.up_proj.weight", f"{mcore}.mlp.linear_fc1.weight"),
        Copy(f"{block}.mlp.down_proj.weight", f"{mcore}.mlp.linear_fc2.weight", split=1),
    ]
    if qkv_bias:
        layer.append(FusedQKV(*(f"{x}.bias" for x in qkv), megatron=f"{mcore}.self_attention.linear_qkv.bias"))
    ends = [
        Vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        Copy("model.norm.weight", "decoder.final_layernorm.weight"),
    ]
    if not hf.tie_word_embeddings:
        ends.append(Vocabulary("lm_head.weight", "output_layer.weight"))
    return WeightTable(
        ends=tuple(ends),
        layer=tuple(layer),
        num_layers=hf.num_hidden_layers,
        num_query_groups=hf.num_key_value_heads,
        heads_per_group=hf.num_attention_heads // hf.num_key_value_heads,
        head_dim=head_dim(hf),
    )
