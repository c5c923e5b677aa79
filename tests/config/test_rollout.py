"""Keys of `reward.*` and `rollout.*` that do not fit together or that are refused."""

import pytest

from megarl.config.rollout import RewardConfig, RewardFunction, RolloutConfig


def test_functions_by_name_or_with_settings():
    brief = {"name": "mine.py:brief", "weight": 0.1, "kwargs": {"unit": "tokens"}}
    config = RewardConfig(functions=["gsm8k", brief])
    assert config.functions == [RewardFunction(name="gsm8k"), RewardFunction(**brief)]
    assert RewardConfig(functions="gsm8k").functions == [RewardFunction(name="gsm8k")]


def test_one_stop_token():
    with pytest.raises(ValueError, match="reward.stop_token=eos and reward.stop_token_id=0 are both set"):
        RewardConfig(functions="gsm8k", stop_token="eos", stop_token_id=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "ignore"},
        {"default_score": float("nan")},
        {"missing_eos_penalty": -1},
        {"timeout_seconds": 0},
        {"max_consecutive_failures": 0},
        {"stop_token_id": -1},
    ],
)
def test_values_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RewardConfig(**{"functions": "gsm8k"} | wrong)


def test_an_overlong_buffer_longer_than_completions(tiny_config):
    functions = {"functions": ["exact_match"]}
    assert tiny_config({"reward": functions | {"overlong_buffer": {"len": 8}}})
    with pytest.raises(ValueError, match="reward.overlong_buffer.len=9 is more than data.max_response_length=8"):
        tiny_config({"reward": functions | {"overlong_buffer": {"len": 9}}})


def test_completions_are_drawn_from_the_whole_distribution():
    """As they are where verl's files say so."""
    assert RolloutConfig(top_p=1, top_k=-1) == RolloutConfig(top_k=-1) and RolloutConfig(top_k=0)
    for key, value in [("top_p", 0.9), ("top_k", 50)]:
        with pytest.raises(ValueError, match=f"{key}\n.*truncated sampling is not offered"):
            RolloutConfig(**{key: value})
