"""2.0 for the exact answer between <answer> tags, 1.5 for the same number written otherwise."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.text import Text, between_last, text_of, truths


def correctness_reward(
    prompts: list[Any],
    completions: list[Text],
    answer: list[Any] | None = None,
    ground_truth: list[Any] | None = None,
    **columns: list,
) -> list[float]:
    """2.0 where the extracted answer is the true one, 1.5 where both hold one and the same number, else 0.0.

    The true one is the dataset's column `answer`, or else the ground truth. Raises CannotScore when a row has neither.
    """
    scores = []
    for completion, truth in zip(completions, truths("correctness_reward", answer, ground_truth), strict=True):
        extracted = extract_answer_from_model_output(text_of(completion))
        if extracted == truth:
            scores.append(2.0)
        else:
            number = None if extracted is None else extract_single_number(extracted)
            scores.append(1.5 if number is not None and number == extract_single_number(truth) else 0.0)
    return scores


def extract_answer_from_model_output(text: str) -> str | None:
    """What the last <answer> tag encloses; None when it is absent, not closed, or the placeholder "..."."""
    found = between_last(text, "answer")
    return None if found == "..." else found


def extract_single_number(text: str) -> float | None:
    """The only number in a text; None when there is none or more than one."""
    numbers = re.findall(r"-?\d*\.?\d+", text)
    return float(numbers[0]) if len(numbers) == 1 else None
