import pytest

from megarl.rewards import CannotScore
from megarl.rewards.math_answer import math_answer


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("the answer is $\\frac{1}{2}$", "\\frac12", 1),
        ("so \\boxed{0.5}", "\\frac12", 1),
        ("It is 1/2.", "$\\frac{1}{2}$", 1),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("\\boxed{\\{2, 1\\}}", "\\boxed{\\{1, 2\\}}", 1),
        ("\\boxed{(1,2]}", "(1,2]", 1),
        ("\\boxed{[1,2]}", "(1,2]", 0),
        ("\\boxed{3}", "4", 0),
        ("I do not know", "4", 0),
        ("", "4", 0),
    ],
)
def test_equal_answers_however_written(text, truth, score):
    graded = math_answer([text], [truth])[0]
    assert graded["score"] == graded["acc"] == score
    assert math_answer([[{"content": text}]], solution=[truth])[0]["score"] == score


def test_whether_it_answered():
    assert [one["answered"] for one in math_answer(["\\boxed{3}", "no"], ["4", "4"])] == [1, 0]


def test_truths_that_are_none():
    with pytest.raises(CannotScore, match="math_answer needs a true answer"):
        math_answer(["3"], [None])
    with pytest.raises(ValueError, match="cannot parse the true answer '  '"):
        math_answer(["3"], ["  "])
