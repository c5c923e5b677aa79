import pytest

from megarl.rewards.reward_format import reward_format


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb\n</think><answer>\nc</answer>", 1.0),  # without DOTALL: 0
        ("<think></think><answer></answer>", 1.0),
        (" <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_the_whole_completion_matches(text, score):
    assert reward_format([text]) == reward_format([[{"content": text}]], prompts=["q"]) == [score]
