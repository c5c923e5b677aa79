"""Mathematical answers, compared by the math-verify library: 1/2, 0.5 and \\frac{1}{2} are one answer."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from megarl.rewards.text import Text, text_of, truths


def math_answer(
    completions: list[Text], ground_truth: list[Any] | None = None, solution: list[Any] | None = None, **columns: list
) -> list[dict[str, float]]:
    r"""score = acc = 1.0 where the completion's answer equals the true one, else 0.0.

    The true one is the ground truth, or else the dataset's column `solution`: LaTeX, bare or with $ or \boxed{} around
    the answer. `answered` is 1.0 where an answer was found. Both are parsed to expressions of sympy and compared, for
    at most 5 seconds each.

    Raises CannotScore for rows without a true answer, ValueError for one that cannot be parsed.
    """
    graded = []
    for completion, truth in zip(completions, truths("math_answer", ground_truth, solution), strict=True):
        marked = truth if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}"
        expected = parse(marked)
        if not expected:
            raise ValueError(f"math-verify cannot parse the true answer {truth!r}")
        found = parse(text_of(completion))
        right = float(bool(found) and verify(expected, found))
        graded.append({"score": right, "acc": right, "answered": float(bool(found))})
    return graded
