import pytest

from megarl.rewards.format_reward import format_reward


def test_a_fifth_per_tag():
    whole = "<reasoning>\na\n</reasoning>\n<answer>\nb\n</answer>"
    texts = ["", "<answer>", "<answer></answer>", "</answer></answer>", whole, "reasoning answer"]
    assert format_reward(completions=texts, ground_truth=[None] * 6) == pytest.approx([0, 0.2, 0.4, 0.2, 0.8, 0])
    assert format_reward([[{"role": "assistant", "content": whole}]]) == pytest.approx([0.8])
