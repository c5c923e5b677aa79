"""Grade-school math (Cobbe et al. 2021): the number behind the last ####."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards import CannotScore
from megarl.rewards.text import Text, number_in, text_of, truths

_NUMBER = r"-?\$?[0-9.,]*[0-9][0-9.,]*"
_CHARACTERS = 300  # the answer stands at the end; a search of the whole text costs time on long ones


def gsm8k(
    completions: list[Text],
    ground_truth: list[Any] | None = None,
    answer: list[Any] | None = None,
    method: str = "strict",
    **columns: list,
) -> list[dict[str, float]]:
    """score = acc = 1.0 where the extracted number equals the true one, else 0.0; `answered` is 1.0 where there is one.

    The true one is the ground truth, or else the dataset's column `answer`; of a worked solution, what follows its
    ####. Numbers are compared as numbers (verl's rule of this name compares their spelling).

    Args:
        method: "strict" takes the number behind the last ####, "flexible" the last number of the completion; both in
            its last 300 characters.

    Raises CannotScore for another method and for rows without a true answer, ValueError for one that is no number.
    """
    if method not in ("strict", "flexible"):
        raise CannotScore(f"gsm8k has method={method!r}; write method: strict or method: flexible")
    graded = []
    for completion, truth in zip(completions, truths("gsm8k", ground_truth, answer), strict=True):
        expected = number_in(truth.rpartition("####")[2])
        if expected is None:
            raise ValueError(f"the true answer {truth!r} holds no number")
        found = extracted(text_of(completion), method)
        right = float(found is not None and number_in(found) == expected)
        graded.append({"score": right, "acc": right, "answered": float(found is not None)})
    return graded


def extracted(text: str, method: str) -> str | None:
    """The number that a completion gives as its answer, as it is written; None without one."""
    marker = "#### *" if method == "strict" else ""
    found = re.findall(f"{marker}({_NUMBER})", text[-_CHARACTERS:])
    return found[-1] if found else None
