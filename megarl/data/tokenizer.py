"""Tokenizers: loading one, and turning prompts and answers into ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder or of a hub name.

    Raises ValueError when the folder is missing or holds no tokenizer, and when a hub name cannot be loaded.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise ValueError(
                f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save one beside the model"
            )
    elif folder.exists():
        raise ValueError(f"tokenizer path {path} is a file; name the checkpoint folder")
    elif path.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ValueError(f"tokenizer folder {path} does not exist (looked for {folder.absolute()})")

    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path)
    except Exception as error:  # transformers and the hub client raise many kinds for one cause: it cannot be loaded
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
        where = "its files cannot be read" if folder.is_dir() else "neither a folder here nor loadable from the hub"
        raise ValueError(f"tokenizer {path}: {where} ({reason})") from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: list[dict[str, Any]] | str) -> np.ndarray:
    """A prompt's token ids, [P] int32, up to where the answer begins.

    Messages go through the chat template. Plain text is one user message where the tokenizer has a chat template;
    where it has none, the text itself is encoded, with the special tokens (such as a BOS) that the tokenizer adds.

    Raises ValueError for messages without a chat template, and for a prompt that gives no token.
    """
    if isinstance(prompt, str):
        if tokenizer.chat_template is None:
            return _ids(tokenizer(prompt)["input_ids"], prompt)
        prompt = [{"role": "user", "content": prompt}]
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the prompt is a list of messages, but the tokenizer {tokenizer.name_or_path} has no chat template; "
            "use one that has (chat_template in tokenizer_config.json), or give the prompts as plain text"
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return _ids(tokenizer(text, add_special_tokens=False)["input_ids"], prompt)


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> np.ndarray:
    """An answer's token ids with the end-of-sequence token behind them, [T] int32, T >= 1.

    Raises ValueError when the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no eos_token; answers could never end. Set one")
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], np.int32)


class PromptEncoder:
    """`encode_prompt` with a memory: datasets repeat prompts, and a chat template costs more than a lookup."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._known: dict[str, np.ndarray] = {}

    def __call__(self, prompt: list[dict[str, Any]] | str) -> np.ndarray:
        name = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        kind = f"{type(prompt).__name__}:{name}"
        if kind not in self._known:
            self._known[kind] = encode_prompt(self._tokenizer, prompt)
        return self._known[kind]


def _ids(ids: list[int], prompt: Any) -> np.ndarray:
    if not ids:
        raise ValueError(f"the prompt {prompt!r} gives no token; every prompt needs at least one")
    return np.array(ids, np.int32)
