"""Paper-size models without weights: every checkpoint tensor's name and shape, and where Megatron keeps it.

The configurations are those of the published config.json files; `num_parameters` is checked against the published
counts by a test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from transformers import DeepseekV3Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from megarl import models
from megarl.models.dense import BLOCK, MEGATRON, head_dim
from megarl.models.weights import Copy, Entry, Experts, GateUp, Vocabulary, WeightTable
from megarl.resharding.megatron_layout import checkpoint_names
from megarl.resharding.pieces import TensorMeta

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """One checkpoint in bfloat16, as layouts and plans see it."""

    name: str
    config: PretrainedConfig
    table: WeightTable
    shapes: dict[str, Shape]  # of every checkpoint tensor, in model order

    @cached_property
    def metas(self) -> dict[str, TensorMeta]:
        return {name: TensorMeta(name, shape, "bfloat16") for name, shape in self.shapes.items()}

    @property
    def num_parameters(self) -> int:
        return sum(meta.numel for meta in self.metas.values())

    @property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self.metas.values())


def gqa_model(name: str, config: PretrainedConfig) -> Model:
    """A model of one of megarl's families (Llama, Qwen2, Qwen3, Qwen3-MoE)."""
    hidden, dim = config.hidden_size, head_dim(config)
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    by_module = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "q_norm": (dim,),
        "k_norm": (dim,),
        "gate_proj": (config.intermediate_size, hidden),
        "up_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
    }
    if config.model_type == "qwen3_moe":
        by_module["gate"] = (config.num_experts, hidden)
        by_module |= _expert_shapes(hidden, config.moe_intermediate_size)
    return _model(name, config, models.get(config.model_type).weight_table(config), by_module)


def deepseek_v3(name: str, config: DeepseekV3Config) -> Model:
    """DeepSeek-V3: multi-head latent attention, experts with a shared one; without the multi-token-prediction layer,
    which the published RL recipes switch off.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    shared = config.n_shared_experts * config.moe_intermediate_size
    by_module = {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_a_layernorm": (config.q_lora_rank,),
        "q_b_proj": (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank),
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
        "gate_proj": (config.intermediate_size, hidden),
        "up_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
        "shared_experts.gate_proj": (shared, hidden),
        "shared_experts.up_proj": (shared, hidden),
        "shared_experts.down_proj": (hidden, shared),
        "gate": (config.n_routed_experts, hidden),
        "e_score_correction_bias": (config.n_routed_experts,),
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
    } | _expert_shapes(hidden, config.moe_intermediate_size)
    dense = _latent_attention() + _mlp("mlp", "mlp")
    moe = _latent_attention() + _experts()
    first_dense = config.first_k_dense_replace
    table = WeightTable(
        first=(Vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight"),),
        layers=(dense,) * first_dense + (moe,) * (config.num_hidden_layers - first_dense),
        last=(
            Copy("model.norm.weight", "decoder.final_layernorm.weight"),
            Vocabulary("lm_head.weight", "output_layer.weight"),
        ),
        num_experts=config.n_routed_experts,
    )
    return _model(name, config, table, by_module)


def _latent_attention() -> tuple[Entry, ...]:
    """Megatron's MLASelfAttention: the down projections are whole on every tensor-parallel rank."""
    hf, megatron = f"{BLOCK}.self_attn", f"{MEGATRON}.self_attention"
    return (
        Copy(f"{BLOCK}.input_layernorm.weight", f"{MEGATRON}.input_layernorm.weight"),
        Copy(f"{hf}.q_a_proj.weight", f"{megatron}.linear_q_down_proj.weight"),
        Copy(f"{hf}.q_a_layernorm.weight", f"{megatron}.q_layernorm.weight"),
        Copy(f"{hf}.q_b_proj.weight", f"{megatron}.linear_q_up_proj.weight", split=0),
        Copy(f"{hf}.kv_a_proj_with_mqa.weight", f"{megatron}.linear_kv_down_proj.weight"),
        Copy(f"{hf}.kv_a_layernorm.weight", f"{megatron}.kv_layernorm.weight"),
        Copy(f"{hf}.kv_b_proj.weight", f"{megatron}.linear_kv_up_proj.weight", split=0),
        Copy(f"{hf}.o_proj.weight", f"{megatron}.linear_proj.weight", split=1),
        Copy(f"{BLOCK}.post_attention_layernorm.weight", f"{MEGATRON}.pre_mlp_layernorm.weight"),
    )


def _mlp(hf: str, megatron: str) -> tuple[Entry, ...]:
    hf, megatron = f"{BLOCK}.{hf}", f"{MEGATRON}.{megatron}"
    return (
        GateUp(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", f"{megatron}.linear_fc1.weight"),
        Copy(f"{hf}.down_proj.weight", f"{megatron}.linear_fc2.weight", split=1),
    )


def _experts() -> tuple[Entry, ...]:
    hf, megatron = f"{BLOCK}.mlp.experts.{{e}}", f"{MEGATRON}.mlp.experts.local_experts.{{e}}"
    return (
        Copy(f"{BLOCK}.mlp.gate.weight", f"{MEGATRON}.mlp.router.weight"),
        Copy(f"{BLOCK}.mlp.gate.e_score_correction_bias", f"{MEGATRON}.mlp.router.expert_bias"),
        Experts(GateUp(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", f"{megatron}.linear_fc1.weight")),
        Experts(Copy(f"{hf}.down_proj.weight", f"{megatron}.linear_fc2.weight", split=1)),
        *_mlp("mlp.shared_experts", "mlp.shared_experts"),
    )


def _expert_shapes(hidden: int, width: int) -> dict[str, Shape]:
    return {
        "experts.gate_proj": (width, hidden),
        "experts.up_proj": (width, hidden),
        "experts.down_proj": (hidden, width),
    }


def _model(name: str, config: PretrainedConfig, table: WeightTable, by_module: dict[str, Shape]) -> Model:
    """`by_module`: shapes by the last word of the module's name, the word before it in front where two differ."""

    def shape_of(tensor: str) -> Shape:
        words = [word for word in tensor.removesuffix(".weight").removesuffix(".bias").split(".") if not word.isdigit()]
        shape = by_module.get(".".join(words[-2:])) or by_module.get(words[-1]) or (config.hidden_size,)
        return shape[:1] if tensor.endswith(".bias") else shape

    return Model(name, config, table, {tensor: shape_of(tensor) for tensor in checkpoint_names(table)})


def qwen2_5_7b() -> Model:
    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    return gqa_model("Qwen2.5-7B", config)


def qwen2_5_32b() -> Model:
    config = Qwen2Config(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    return gqa_model("Qwen2.5-32B", config)


def qwen3_30b_a3b() -> Model:
    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    return gqa_model("Qwen3-30B-A3B", config)


def qwen3_235b_a22b() -> Model:
    config = Qwen3MoeConfig(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    return gqa_model("Qwen3-235B-A22B", config)


def deepseek_v3_671b() -> Model:
    config = DeepseekV3Config(
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=129280,
    )
    return deepseek_v3("DeepSeek-V3", config)


MODELS: dict[str, Callable[[], Model]] = {
    "Qwen2.5-7B": qwen2_5_7b,
    "Qwen2.5-32B": qwen2_5_32b,
    "Qwen3-30B-A3B": qwen3_30b_a3b,
    "Qwen3-235B-A22B": qwen3_235b_a22b,
    "DeepSeek-V3": deepseek_v3_671b,
}
