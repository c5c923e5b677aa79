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


def truths(rule: str, answers: list[Any] | None, ground_truth: list[Any] | None) -> list[str]:
    """The true answers as texts: the dataset's own column, or else ground_truth. CannotScore where one is missing."""
    found = answers if answers is not None else ground_truth
    if found is None or None in found:
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
