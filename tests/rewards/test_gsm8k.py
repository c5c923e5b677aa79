import pytest

from megarl.rewards import CannotScore
from megarl.rewards.gsm8k import gsm8k

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so\n#### 1072", 1, 1),
        ("#### 5\n#### $1,072.00", 1, 1),
        ("####1072", 1, 1),
        ("#### 1073", 0, 0),
        ("the answer is 1,072.", 0, 1),
        ("#### 1072 of 1100", 1, 0),
        ("#### none, but 1072", 0, 1),
        ("#### -1072", 0, 0),
        ("no number ...", 0, 0),
        ("#### 1072" + "x" * 300, 0, 0),
    ],
)
def test_strict_and_flexible(text, strict, flexible):
    for truth in ("1072", SOLUTION):
        assert gsm8k([text], [truth])[0]["score"] == strict
        assert gsm8k([[{"content": text}]], answer=[truth], method="flexible")[0]["acc"] == flexible


def test_whether_it_answered():
    assert [one["answered"] for one in gsm8k(["#### 3", "3", ""], ["4"] * 3)] == [1, 0, 0]


def test_wrong_use():
    with pytest.raises(CannotScore, match="method='loose'; write method: strict or method: flexible"):
        gsm8k(["a"], ["1"], method="loose")
    with pytest.raises(CannotScore, match="gsm8k needs a true answer"):
        gsm8k(["a"], [None])
    with pytest.raises(ValueError, match="'many' holds no number"):
        gsm8k(["a"], ["many"])
