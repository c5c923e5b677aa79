"""Tiny checkpoints that vLLM's CPU engine runs, and what transformers says of them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from megarl.data.arithmetic import build_tokenizer

SHAPE = dict(
    hidden_size=128,  # heads of 32, the smallest that vLLM's CPU attention takes
    intermediate_size=96,
    num_hidden_layers=4,  # two stages of two chunks
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.1,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
# A tied head has its own post-processing on the CPU. A vocabulary of 3,001 rows makes tensors over one bucket of 1 MiB,
# and does not divide by two.
FAMILIES = {
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, vocab_size=128, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SHAPE, vocab_size=131, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SHAPE, vocab_size=3001, tie_word_embeddings=False),
    "llama-wide": lambda: LlamaConfig(**SHAPE, vocab_size=30001, tie_word_embeddings=False),  # 15 MiB tensors
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE,
        head_dim=32,
        vocab_size=128,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
}
SEQUENCES = [np.array([3 + i, 40 + i, 50 + 2 * i, 9 + i, 4, 70 + i, 5 + 3 * i], np.int32) for i in range(12)]


def checkpoint(family: str, folder: Path, seed: int) -> Path:
    """A random fp32 checkpoint with the arithmetic task's tokenizer; biases and norms are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def expected_scores(folder: Path) -> list[list[float]]:
    """transformers' log-probs of the tokens of SEQUENCES but each one's first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for sequence in SEQUENCES:
            ids = torch.tensor(sequence[None].astype(np.int64))
            logprobs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())
    return found
