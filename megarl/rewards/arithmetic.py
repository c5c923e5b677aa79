"""For sums such as `07+45=`: 0.9 for the right number, 0.1 for the form (digits only, and ended)."""

from __future__ import annotations

import re


def arithmetic(
    completions: list[str], ground_truth: list[str], finish_reason: list[str], **columns: list
) -> list[dict[str, float]]:
    """score = 0.9 acc + 0.1 format.

    `format` is 1 for a text of the digits 0-9 alone that an end-of-sequence token ended; `acc` is 1 where it is also
    the ground truth as a number (leading zeros do not count).
    """
    graded = []
    for text, truth, reason in zip(completions, ground_truth, finish_reason, strict=True):
        form = float(reason == "stop" and re.fullmatch("[0-9]+", text) is not None)
        acc = float(form == 1.0 and text.lstrip("0") == truth.lstrip("0"))
        graded.append({"score": 0.9 * acc + 0.1 * form, "acc": acc, "format": form})
    return graded
