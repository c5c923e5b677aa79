"""1.0 for a completion that is <think>...</think><answer>...</answer> and nothing else."""

from __future__ import annotations

import re

from megarl.rewards.text import Text, text_of

# DOTALL: thoughts have more than one line.
_PATTERN = re.compile(r"^<think>.*?</think><answer>.*?</answer>$", re.DOTALL)


def reward_format(completions: list[Text], **columns: list) -> list[float]:
    """1.0 where the whole completion matches, else 0.0."""
    return [float(_PATTERN.match(text_of(completion)) is not None) for completion in completions]
