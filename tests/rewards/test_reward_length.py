import pytest

from megarl.rewards import CannotScore
from megarl.rewards.reward_length import reward_length


def test_characters_or_tokens():
    assert reward_length(["", "abc"]) == reward_length([[{"content": ""}], [{"content": "abc"}]]) == [0.0, 3.0]
    assert reward_length(["", "abc"], completion_ids=[[1], [5, 6, 1]], unit="tokens") == [1.0, 3.0]


def test_wrong_units():
    with pytest.raises(CannotScore, match="unit='words'; write unit: chars or unit: tokens"):
        reward_length(["a"], unit="words")
    with pytest.raises(CannotScore, match="needs completion_ids"):
        reward_length(["a"], unit="tokens")
