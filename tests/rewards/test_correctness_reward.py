import pytest

from megarl.rewards import CannotScore
from megarl.rewards.correctness_reward import (
    correctness_reward,
    extract_answer_from_model_output,
    extract_single_number,
)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("<answer>72</answer>", "72", 2.0),
        ("<answer>5</answer> no: <answer>\n72\n</answer>", "72", 2.0),
        ("<answer>72.0</answer>", "72", 1.5),
        ("<answer>it is 72 apples</answer>", "72", 1.5),
        ("<answer>72 or 73</answer>", "72", 0.0),
        ("<answer>73</answer>", "72", 0.0),
        ("72", "72", 0.0),
        ("<answer>72", "72", 0.0),
        ("<answer>...</answer>", "...", 0.0),
        ("", "None", 0.0),
        ("<answer>Paris</answer>", "Paris", 2.0),
    ],
)
def test_two_for_exact_one_and_a_half_for_the_number(text, answer, score):
    assert correctness_reward(prompts=["q"], completions=[text], answer=[answer]) == [score]
    conversational = [[{"role": "assistant", "content": text}]]
    assert correctness_reward(["q"], conversational, [answer], data_source=["any"]) == [score]
    assert correctness_reward(["q"], [text], ground_truth=[answer]) == [score]


def test_a_dataset_without_answers_is_refused():
    with pytest.raises(CannotScore, match="correctness_reward needs a true answer"):
        correctness_reward(["q"], ["a"])


def test_helpers():
    assert extract_answer_from_model_output("<answer> a </answer>") == "a"
    assert extract_answer_from_model_output("a") is None
    assert extract_single_number("-.5 apples") == -0.5
    assert extract_single_number("none") is extract_single_number("1 and 2") is None
