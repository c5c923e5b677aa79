"""Weights, names and penalties; the functions run in a real worker."""

import asyncio

import numpy as np
import pytest

from megarl.config.rollout import RewardConfig
from megarl.rewards.scoring import Scorer
from megarl.rewards.workers import RewardWorkers
from megarl.types import Completion, Prompt

PROMPT = Prompt(41, np.array([1], np.int32), [{"role": "user", "content": "q"}], "yes", "quiz", {"level": 5})


def completion(length, reason):
    ones = np.ones(length, np.int32)
    return Completion(ones, np.zeros(length, np.float32), reason, ones.astype(np.uint8), ones)


def score(tmp_path, texts, lengths, reasons, **settings):
    (tmp_path / "mine.py").write_text(
        "def rule(completions, ground_truth, level, **columns):\n"
        "    return [{'score': float(t == g), 'level': l} for t, g, l in zip(completions, ground_truth, level)]\n"
        "def divides(completions):\n"
        "    return [1 / (text != 'no') for text in completions]\n"
    )
    functions = [
        {"name": f"{tmp_path}/mine.py:rule", "weight": 0.9},
        {"name": f"{tmp_path}/mine.py:divides", "weight": -2.0},
    ]
    config = RewardConfig.model_validate({"functions": functions, "num_workers": 1} | settings)

    async def work():
        workers = RewardWorkers(config)
        try:
            await workers.start()
            scorer = Scorer(config, workers, max_response_length=10)
            return await scorer.score(PROMPT, [completion(*one) for one in zip(lengths, reasons)], texts)
        finally:
            await workers.close()

    return asyncio.run(work())


def test_weighted_sum_parts_events_and_penalties(tmp_path):
    scores = score(
        tmp_path,
        ["yes", "no", "maybe"],
        [4, 8, 10],
        ["stop", "stop", "length"],
        default_score=-1.0,
        missing_eos_penalty=0.25,
        overlong_buffer={"len": 4, "penalty_factor": 2.0},
    )
    assert list(scores.parts) == ["rule", "rule/level", "divides", "missing_eos_penalty", "overlong_penalty"]
    np.testing.assert_array_equal(scores.parts["rule/level"], [5, 5, 5])
    np.testing.assert_array_equal(scores.parts["divides"], [1, -1, 1])
    np.testing.assert_array_equal(scores.parts["missing_eos_penalty"], [0, 0, -0.25])
    np.testing.assert_array_equal(scores.parts["overlong_penalty"], [0, -1, -2])
    np.testing.assert_allclose(scores.total, [0.9 - 2, 2 - 1, -2 - 0.25 - 2])
    assert all(part.dtype == np.float64 for part in [scores.total, *scores.parts.values()])
    assert scores.events["divides/errors"] == 1 and sum(scores.events.values()) == 1
    assert set(scores.events) == {
        f"{name}/{event}" for name in ("rule", "divides") for event in ("timeouts", "crashes", "errors", "invalid")
    }
    assert scores.messages == [
        "reward function 'divides', on prompt 41 of data source 'quiz' with completion 'no', "
        "raised ZeroDivisionError: division by zero"
    ]


def test_without_penalties_there_is_no_part_for_them(tmp_path):
    scores = score(tmp_path, ["yes"], [10], ["length"])
    assert list(scores.parts) == ["rule", "rule/level", "divides"]
    assert scores.total == pytest.approx([-1.1])
