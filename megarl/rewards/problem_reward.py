"""1.0 for the right final answer, however it is marked; what cannot be read is 0.0."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.text import Text, between_last, number_in, text_of, truths

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def problem_reward(
    completions: list[Text],
    answers: list[Any] | None = None,
    ground_truth: list[Any] | None = None,
    **columns: list,
) -> list[float]:
    """1.0 where the final answer is the true one, as a number if both are numbers; else 0.0.

    The true one is the dataset's column `answers`, or else the ground truth. Raises CannotScore when a row has neither;
    no completion makes it raise.
    """
    pairs = zip(completions, truths("problem_reward", answers, ground_truth), strict=True)
    return [float(_same(extract_final_answer(text_of(completion)), truth)) for completion, truth in pairs]


def extract_final_answer(text: str) -> str | None:
    """The last <answer>, else the last \\boxed{} (without braces in it), else what follows the last ####, else the last
    number; None without any of these."""
    tagged = between_last(text, "answer")
    if tagged is not None:
        return tagged
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxed:
        return boxed[-1].strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _same(answer: str | None, truth: str) -> bool:
    if answer is None:
        return False
    numbers = number_in(answer), number_in(truth)
    return answer == truth.strip() if None in numbers else numbers[0] == numbers[1]
