"""Preferences for reward-model training: a prompt, a chosen answer and a rejected one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from megarl.config.data import PairDataConfig
from megarl.data.files import Row, load_rows
from megarl.data.order import Mixture, Order
from megarl.data.prompts import prompt_of

Pair = tuple[np.ndarray, np.ndarray]  # prompt and chosen answer, prompt and rejected answer: ids [T] int32
PairSet = Mixture[Pair]
PairOrder = Order[Pair]
Encode = Callable[[list[dict[str, Any]] | str, str], np.ndarray]  # (prompt, answer) -> ids [T] int32


def load_pairs(config: PairDataConfig, encode: Encode, split: Literal["train", "val"] = "train") -> PairSet:
    """The pairs of data.train_files or data.val_files (an empty set where there are none).

    Raises ValueError, which names file and row, for a row without prompt, chosen or rejected answer, for an answer that
    is neither a text nor one assistant message, for what `encode` refuses, and all that `load_rows` refuses.
    """
    files = config.train_files if split == "train" else config.val_files

    def pair(row: Row) -> Pair:
        prompt = prompt_of(row, config.prompt_key)
        try:
            chosen, rejected = (encode(prompt, _answer(row, key)) for key in (config.chosen_key, config.rejected_key))
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error
        return chosen, rejected

    pairs = [[pair(row) for row in rows] for rows in load_rows(files)]
    return PairSet(pairs, [file.weight for file in files])


def _answer(row: Row, key: str) -> str:
    answer = row.columns.get(key)
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = answer[0].get("content")
    if not isinstance(answer, str):
        raise ValueError(
            f"the column {key} must be a text or a list of one assistant message; the row's columns are "
            f"{', '.join(row.columns)}. Name the right ones with data.chosen_key and data.rejected_key"
        )
    return answer
