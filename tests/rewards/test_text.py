from decimal import Decimal

import pytest

from megarl.rewards import CannotScore
from megarl.rewards.text import between_last, number_in, text_of, truths


def test_text_of_both_forms():
    assert text_of("a") == text_of([{"role": "assistant", "content": "a"}]) == "a"


def test_truths():
    assert truths("rule", [1, "b"], None) == truths("rule", None, [1, "b"]) == ["1", "b"]
    assert truths("rule", ["a"], ["b"]) == ["a"]
    assert truths("rule", [None, "a"], ["b", None]) == ["b", "a"]  # data mixed of two files
    for answers, ground_truth in [(None, None), (None, ["a", None]), ([None], [None])]:
        with pytest.raises(CannotScore, match="rule needs a true answer in every row"):
            truths("rule", answers, ground_truth)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<b>1</b><b> 2\n</b>", "2"),
        ("<b></b>", ""),
        ("<b>1</b><b>2", None),
        ("1</b>", None),
        ("</b><b>", None),
        ("", None),
    ],
)
def test_between_last(text, inside):
    assert between_last(text, "b") == inside


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" $1,234.50. ", "1234.5"),
        ("-.5", "-0.5"),
        ("72.", "72"),
        ("+3", "3"),
        ("1e3", None),
        ("1 2", None),
        ("", None),
        ("nan", None),
        ("\u0665", None),
        ("--1", None),
    ],
)
def test_number_in(text, number):
    assert number_in(text) == (None if number is None else Decimal(number))
