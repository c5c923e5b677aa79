"""Tiny checkpoints of every family, made by transformers itself: the oracle that ours are compared with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SHAPE = dict(
    vocab_size=131,  # odd on purpose: Megatron has to pad it
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DEEP = SHAPE | dict(num_hidden_layers=4, head_dim=32)  # as many layers as two stages of two chunks take
MOE = DEEP | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
CONFIGS = {
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2-yarn": lambda: Qwen2Config(**SHAPE, rope_parameters=YARN_ROPE),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, head_dim=32),
    "llama-untied-llama3": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-linear": lambda: LlamaConfig(**SHAPE, rope_parameters=LINEAR_ROPE),
    "qwen3-tied": lambda: Qwen3Config(**DEEP, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**MOE, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: Qwen3MoeConfig(**MOE, norm_topk_prob=False, mlp_only_layers=[1]),
}


def make(name: str, folder: Path, seed: int = 1, **save_options) -> Path:
    """Save a random fp32 checkpoint of CONFIGS[name]; biases and norms are random too, so that a lost one shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, **save_options)
    return folder


def logits(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    """transformers' logits [sum of lengths, V], each sequence on its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([s])).logits[0] for s in sequences])
