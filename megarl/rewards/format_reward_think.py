"""1.0 for thoughts and an answer in their tags, 0.5 for the tags alone."""

from __future__ import annotations

import re

from megarl.rewards.text import Text, text_of

_PATTERN = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
_FEWEST_CHARACTERS = 20


def format_reward_think(completions: list[Text], **columns: list) -> list[float]:
    """1.0 where <think> encloses more than 20 characters and <answer> some; 0.5 where both are there; else 0.0.

    White space at either end of what a tag encloses does not count.
    """
    scores = []
    for completion in completions:
        match = _PATTERN.search(text_of(completion))
        if match is None:
            scores.append(0.0)
        else:
            thought, answer = (part.strip() for part in match.groups())
            scores.append(1.0 if len(thought) > _FEWEST_CHARACTERS and answer else 0.5)
    return scores
