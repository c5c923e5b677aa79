"""The arithmetic task: two-digit sums for a character-level model, made locally from a seed.

A policy that was warm-started on demonstrations of which half are wrong unlearns the noise by reinforcement learning.
It is small enough to learn in minutes on two CPU cores, and it shows that the machinery learns; nothing about language.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unk|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUM_HELD_OUT = 1000  # of the 10,000 pairs of operands 0..99
NUM_SFT_VAL = 256
# 700 steps of 256 examples without one noisy demonstration seen twice: 20 x 9,000 >= 700 x 256.
NUM_DEMONSTRATIONS = 20
WRONG_SHARE = 0.5
SLIPS = (-10, -2, -1, 1, 2, 10)
# 1,000 steps of 256 preferences with none seen more than three times: 3 x 10 x 9,000 >= 1,000 x 256.
NUM_PREFERENCES = 10
FAR_SHARE = 1 / 3
LARGEST_SUM = 198

Pair = tuple[int, int]


def make_arithmetic_task(output_dir: str | Path, seed: int = 0) -> Path:
    """Write the task into `output_dir`, say what was written, and return the folder.

    model/             a random Qwen2 (509k parameters, fp32) with its tokenizer, as a Hugging Face checkpoint
    train.jsonl        9,000 prompts with their ground truth; heldout.jsonl: 1,000 others
    sft_train.jsonl    20 demonstrations of each training prompt, half of them wrong
    sft_val.jsonl      right answers to 256 of the training prompts
    pairs_train.jsonl  10 preferences for each training prompt: the right answer over a slip of the demonstrations or,
                       in a third of them, over any other number
    pairs_val.jsonl    for each held-out prompt the right answer, preferred to a slip

    `seed` draws the weights, the wrong answers and sft_val; which prompts are held out is the same for every
    seed, so that runs compare. Files of these names are replaced.

    Raises ValueError when `output_dir` is a file.
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    train, held_out = split_pairs()

    model = build_model(seed)
    model.save_pretrained(folder / "model")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder / 'model'}: random Qwen2, {parameters:,} parameters, tokenizer of {len(tokenizer)} tokens")

    _write(folder / "train.jsonl", map(_prompt_row, train), "prompts to train on")
    _write(folder / "heldout.jsonl", map(_prompt_row, held_out), "held-out prompts")
    noisy = (_example(pair, demonstration(pair, rng)) for _ in range(NUM_DEMONSTRATIONS) for pair in train)
    _write(folder / "sft_train.jsonl", noisy, "demonstrations, half of them wrong")
    _write(
        folder / "sft_val.jsonl",
        (_example(pair, sum(pair)) for pair in rng.sample(train, NUM_SFT_VAL)),
        "training prompts with the right answer",
    )
    preferences = (_preference(pair, rejected(pair, rng)) for _ in range(NUM_PREFERENCES) for pair in train)
    _write(folder / "pairs_train.jsonl", preferences, "preferences of the right answer")
    slips = (_preference(pair, wrong_answer(pair, rng)) for pair in held_out)
    _write(folder / "pairs_val.jsonl", slips, "preferences of the right answer to a slip")
    return folder


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """9,000 pairs of operands to train on and 1,000 others, always the same."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(1234).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def demonstration(pair: Pair, rng: random.Random) -> int:
    """The sum, or, in half of the calls, a number that is off by 1, 2 or 10."""
    return sum(pair) if rng.random() >= WRONG_SHARE else wrong_answer(pair, rng)


def wrong_answer(pair: Pair, rng: random.Random) -> int:
    """A number that is off by 1, 2 or 10, and not negative."""
    return sum(pair) + rng.choice([slip for slip in SLIPS if sum(pair) + slip >= 0])


def rejected(pair: Pair, rng: random.Random) -> int:
    """A wrong answer, or, in a third of the calls, any other number of 0..198 than the sum."""
    if rng.random() >= FAR_SHARE:
        return wrong_answer(pair, rng)
    return (sum(pair) + rng.randrange(1, LARGEST_SUM + 1)) % (LARGEST_SUM + 1)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: 6 special tokens, the newline and printable ASCII, 102 in all; with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n"] + [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int) -> Qwen2ForCausalLM:
    """A random Qwen2: 2 layers, hidden 128, 4 heads of 32 over 2 KV heads, 128 rows of tied embeddings, fp32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128,  # 102 tokens, padded to what tensor parallelism divides
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_theta=10000.0,
        initializer_range=0.05,  # the usual 0.02 is for wide models; with it the warm start takes longer
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def _question(pair: Pair) -> str:
    return f"{pair[0]:02d}+{pair[1]:02d}="


def _prompt_row(pair: Pair) -> dict[str, Any]:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": _question(pair)}],
        "reward_model": {"style": "rule", "ground_truth": f"{sum(pair):03d}"},
    }


def _example(pair: Pair, answer: int) -> dict[str, str]:
    return {"prompt": _question(pair), "response": f"{answer:03d}"}


def _preference(pair: Pair, rejected: int) -> dict[str, str]:
    return {"prompt": _question(pair), "chosen": f"{sum(pair):03d}", "rejected": f"{rejected:03d}"}


def _write(file: Path, rows: Iterable[dict[str, Any]], what: str) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines))
    print(f"{file}: {len(lines):,} {what}")
