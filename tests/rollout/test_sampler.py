"""Scores from reward functions, and the errors of those."""

import numpy as np
import pytest

from megarl.rollout.sampler import WeightedReward, derive_seed, score_group
from megarl.types import Prompt

PROMPT = Prompt(41, np.array([1], np.int32), [{"role": "user", "content": "q"}], "yes", "quiz", {"level": 5})
TEXTS = ["yes", "no", "x" * 500]
REASONS = ["stop", "stop", "length"]


def score(*rewards):
    return score_group(
        PROMPT, TEXTS, REASONS, [WeightedReward(name, weight, function) for name, weight, function in rewards]
    )


def failing(function):
    with pytest.raises(ValueError) as caught:
        score(("mine", 1.0, function))
    return str(caught.value)


def test_scores_are_weighted_sums_and_extras_keep_their_names():
    def rule(completions, prompts, ground_truth, finish_reason, data_source, level):
        assert (
            prompts == [PROMPT.messages] * 3
            and finish_reason == REASONS
            and data_source == ["quiz"] * 3
            and level == [5] * 3
        )
        return [{"score": float(text == truth), "length": len(text)} for text, truth in zip(completions, ground_truth)]

    total, parts = score(("rule", 0.9, rule), ("constant", -2.0, lambda completions, **columns: np.float32([1, 2, 3])))
    np.testing.assert_allclose(total, [0.9 - 2, -4, -6])
    assert parts.keys() == {"rule", "rule/length", "constant"}
    np.testing.assert_array_equal(parts["rule/length"], [3, 2, 500])
    assert all(part.dtype == np.float64 for part in [total, *parts.values()])


def test_a_function_that_raises_is_told_with_its_sample():
    def divides(completions, **columns):
        return [1 / (text != "no") for text in completions]

    message = failing(divides)
    assert message == (
        "reward function 'mine', on prompt 41 of data source 'quiz' with completion 'no', "
        "raised ZeroDivisionError: division by zero"
    )


def test_long_completions_are_shortened():
    message = failing(lambda completions, **columns: [float("nan") if len(text) > 100 else 0.0 for text in completions])
    assert "x" * 120 + "..." in message and "x" * 121 not in message
    assert message.endswith("returned score=nan, which is not a finite number")


def test_wrong_values():
    assert "returned 2 values for 3 completions" in failing(lambda completions, **columns: [0.0, 1.0])
    assert "returned score='1', which is not a finite number" in failing(lambda completions, **columns: ["1"] * 3)
    assert "returned score=None" in failing(lambda completions, **columns: [0.0, None, 0.0])
    assert "same keys, 'score' among them" in failing(lambda completions, **columns: [{"acc": 1.0}] * 3)
    mixed = [{"score": 1.0, "acc": 1.0}, {"score": 1.0}, 0.0]
    assert "with completion 'no', returned a dict with the keys ['score']" in failing(
        lambda completions, **columns: mixed
    )
    assert "with completion 'no', returned acc=inf" in failing(
        lambda completions, **columns: [
            {"score": 0.0, "acc": float("inf") if text == "no" else 0.0} for text in completions
        ]
    )
    assert "raised TypeError" in failing(lambda completions: [0.0] * 3)


def test_seeds_depend_on_every_part_and_leave_room_for_n():
    seeds = {
        derive_seed(seed, "train", step, prompt) for seed in range(3) for step in range(10) for prompt in range(100)
    }
    assert len(seeds) == 3000 and max(seeds) < 2**62
    ordered = sorted(seeds)
    assert min(b - a for a, b in zip(ordered, ordered[1:])) > 10_000
    assert derive_seed(0, "train", 1, 2) == derive_seed(0, "train", 1, 2) != derive_seed(0, "val", 1, 2)
