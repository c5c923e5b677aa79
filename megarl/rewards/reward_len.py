"""How near the length of a completion is to 20."""

from __future__ import annotations

from megarl.rewards.reward_length import lengths
from megarl.rewards.text import Text

_WANTED = 20


def reward_len(
    completions: list[Text], completion_ids: list[list[int]] | None = None, unit: str = "chars", **columns: list
) -> list[float]:
    """-|20 - length|, in characters, or with `unit` "tokens" in the tokens that the policy wrote."""
    return [float(-abs(_WANTED - length)) for length in lengths(completions, completion_ids, unit)]
