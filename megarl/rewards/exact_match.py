"""1 where the completion is the ground truth, up to white space around it."""

from __future__ import annotations

from typing import Any

from megarl.rewards import CannotScore


def exact_match(completions: list[str], ground_truth: list[Any], **columns: list) -> list[float]:
    """1.0 where the stripped text equals str(ground truth), stripped; else 0.0.

    Raises CannotScore when a row of the dataset has no ground truth.
    """
    if None in ground_truth:
        raise CannotScore("exact_match needs a ground truth in every row: reward_model.ground_truth or ground_truth")
    pairs = zip(completions, ground_truth, strict=True)
    return [float(text.strip() == str(truth).strip()) for text, truth in pairs]
