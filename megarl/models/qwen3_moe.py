"""Qwen3-MoE: Qwen3's attention, and in most layers experts behind a softmax router instead of the MLP.

Dropless, and without an auxiliary loss: what a token's experts compute depends on that token alone.
"""

from transformers import PretrainedConfig

from megarl.models import dense, qwen3
from megarl.models.dense import BLOCK, MEGATRON
from megarl.models.weights import Copy, Entry, Experts, GateUp, WeightTable


def has_experts(hf: PretrainedConfig, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0


def check(hf: PretrainedConfig) -> None:
    """Raises ValueError for a Qwen3-MoE config with what Megatron's layers do not do."""
    qwen3.check(hf)
    if not 0 < hf.num_experts_per_tok <= hf.num_experts:
        raise ValueError(
            f"num_experts_per_tok={hf.num_experts_per_tok} in config.json must be in 1..num_experts={hf.num_experts}"
        )
    if hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
        raise ValueError(
            "norm_topk_prob=true with num_experts_per_tok=1 in config.json is not supported: the router's weight would "
            "be the constant 1; set norm_topk_prob=false"
        )
    if not any(has_experts(hf, layer) for layer in range(hf.num_hidden_layers)):
        raise ValueError(
            f"no layer has experts: mlp_only_layers={hf.mlp_only_layers} and decoder_sparse_step="
            f"{hf.decoder_sparse_step} in config.json leave none of {hf.num_hidden_layers}; such a model is a qwen3"
        )


def transformer_fields(hf: PretrainedConfig) -> dict:
    """Fields of Megatron's TransformerConfig."""
    return qwen3.transformer_fields(hf) | dict(
        num_moe_experts=hf.num_experts,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_layer_freq=[int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
        moe_router_topk=hf.num_experts_per_tok,
        # The softmax of the chosen logits is the softmax of all, chosen and divided by its sum.
        moe_router_pre_softmax=not hf.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _moe_entries() -> tuple[Entry, ...]:
    checkpoint, megatron = f"{BLOCK}.mlp.experts.{{e}}", f"{MEGATRON}.mlp.experts"
    fc1, fc2 = (
        (f"{megatron}.local_experts.{{e}}.linear_fc{i}.weight", f"{megatron}.linear_fc{i}.weight{{e}}") for i in (1, 2)
    )
    return (
        Copy(f"{BLOCK}.post_attention_layernorm.weight", f"{MEGATRON}.pre_mlp_layernorm.weight"),
        Copy(f"{BLOCK}.mlp.gate.weight", f"{MEGATRON}.mlp.router.weight"),
        Experts(GateUp(f"{checkpoint}.gate_proj.weight", f"{checkpoint}.up_proj.weight", fc1)),
        Experts(Copy(f"{checkpoint}.down_proj.weight", fc2, split=1)),
    )


def weight_table(hf: PretrainedConfig) -> WeightTable:
    """Where each checkpoint tensor lies."""
    attention = dense.attention_entries(qk_norm=True)
    plain, moe = attention + dense.mlp_entries(), attention + _moe_entries()
    layers = tuple(moe if has_experts(hf, layer) else plain for layer in range(hf.num_hidden_layers))
    return dense.table(hf, layers, num_experts=hf.num_experts)
