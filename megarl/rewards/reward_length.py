"""The length of a completion."""

from __future__ import annotations

from megarl.rewards import CannotScore
from megarl.rewards.text import Text, text_of


def reward_length(
    completions: list[Text], completion_ids: list[list[int]] | None = None, unit: str = "chars", **columns: list
) -> list[float]:
    """Characters, or with `unit` "tokens" the tokens that the policy wrote, its end-of-sequence token included."""
    return [float(length) for length in lengths(completions, completion_ids, unit)]


def lengths(completions: list[Text], completion_ids: list[list[int]] | None, unit: str) -> list[int]:
    """How long each completion is in `unit`: "chars" or "tokens". CannotScore for another unit, or without ids."""
    if unit == "chars":
        return [len(text_of(completion)) for completion in completions]
    if unit != "tokens":
        raise CannotScore(f"a length has unit={unit!r}; write unit: chars or unit: tokens")
    if completion_ids is None:
        raise CannotScore("unit='tokens' needs completion_ids, the token ids of each completion")
    return [len(ids) for ids in completion_ids]
