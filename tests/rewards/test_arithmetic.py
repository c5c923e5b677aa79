import pytest

from megarl.rewards.arithmetic import arithmetic


@pytest.mark.parametrize(
    ("text", "finish_reason", "acc", "form"),
    [
        ("052", "stop", 1, 1),
        ("52", "stop", 1, 1),
        ("053", "stop", 0, 1),
        ("052", "length", 0, 0),
        (" 052", "stop", 0, 0),
        ("052\n", "stop", 0, 0),
        ("-52", "stop", 0, 0),
        ("", "stop", 0, 0),
        ("\u0665\u0662", "stop", 0, 0),  # digits to Python, not to the task
        ("9" * 5000, "stop", 0, 1),
    ],
)
def test_nine_tenths_for_the_number_one_tenth_for_the_form(text, finish_reason, acc, form):
    graded = arithmetic(completions=[text], ground_truth=["052"], finish_reason=[finish_reason], prompts=[None])
    assert graded == [{"score": pytest.approx(0.9 * acc + 0.1 * form), "acc": acc, "format": form}]


def test_zero_is_a_number():
    assert [g["acc"] for g in arithmetic(["000", "0", "1"], ["000"] * 3, ["stop"] * 3)] == [1, 1, 0]
