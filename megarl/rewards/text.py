"""Texts of completions, and the numbers and answers in them: what several rules need."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from megarl.rewards import CannotScore

Text = str | list[dict[str, Any]]  # a completion: a text, or messages as TRL gives them


def text_of(completion: Text) -> str:
    """The text of a completion, which may be conversational: [{"role": "assistant", "content": text}]."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def truths(rule: str, first: list[Any] | None, second: list[Any] | None) -> list[str]:
    """The true answers as texts: each row's of the first column, or else of the second. CannotScore without either.

    A column that the dataset does not have, or that is empty in some rows, comes as None or with None in it: in a run
    there always is a `ground_truth`.
    """
    columns = [column for column in (first, second) if column is not None]
    found = [next((one for one in row if one is not None), None) for row in zip(*columns, strict=True)]
    if not columns or None in found:
        raise CannotScore(f"{rule} needs a true answer in every row: its own column, or ground_truth")
    return [str(one) for one in found]


def between_last(text: str, tag: str) -> str | None:
    """What the last <tag> encloses, stripped; None when it is absent or not closed."""
    _, opened, behind = text.rpartition(f"<{tag}>")
    inside, closed, _ = behind.partition(f"</{tag}>")
    return inside.strip() if opened and closed else None


def number_in(text: str) -> Decimal | None:
    """The number that a text is, up to white space, a dollar sign, thousands' commas and a full stop; else None."""
    plain = text.strip().replace(",", "").replace("$", "").removesuffix(".")
    return Decimal(plain) if re.fullmatch(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)", plain) else None
