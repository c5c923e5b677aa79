import pytest

from megarl.rewards.format_reward_think import format_reward_think


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>" + "a" * 21 + "</think><answer>4</answer>", 1.0),
        ("<think>" + "a" * 20 + "</think><answer>4</answer>", 0.5),
        ("<think>line after line\nof thought</think>\n<answer>\n4\n</answer>", 1.0),
        ("<think>" + " " * 40 + "</think><answer>4</answer>", 0.5),
        ("<think>" + "a" * 30 + "</think><answer> </answer>", 0.5),
        ("<think></think><answer></answer>", 0.5),
        ("<think>" + "a" * 30 + "</think>4", 0.0),
        ("<answer>4</answer><think>" + "a" * 30 + "</think>", 0.0),
        ("", 0.0),
    ],
)
def test_thoughts_and_answer(text, score):
    assert format_reward_think([text]) == format_reward_think([[{"content": text}]]) == [score]
