"""0.2 for each of the tags <reasoning> </reasoning> <answer> </answer> that a completion holds."""

from __future__ import annotations

from megarl.rewards.text import Text, text_of

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def format_reward(completions: list[Text], **columns: list) -> list[float]:
    """0.2 per tag that occurs, wherever and however often: 0.8 at most."""
    texts = map(text_of, completions)
    return [sum(tag in text for tag in TAGS) / 5 for text in texts]
