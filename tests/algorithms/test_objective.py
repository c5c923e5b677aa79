"""The objective metrics by their definitions, and over ranks; what is no mean over tokens."""

import numpy as np
import pytest
import torch

from megarl.algorithms import grpo, metrics, objective, reward_shaping
from tests.algorithms.batches import on_ranks, pack, take

MASK = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
LOGPROBS = np.array([[-1.0, -2, -9, -3], [-4, 0, 0, 0], [0, 0, 0, 0]])
REFERENCE = LOGPROBS - np.array([[0.1, 0.2, 5, -0.6], [0.4, 0, 0, 0], [0, 0, 0, 0]])


def a_batch(**keys):
    batch, _ = pack(MASK, scores=np.array([1.0, 2.0, 6.0]), logprobs=LOGPROBS, ref_logprobs=REFERENCE)
    return reward_shaping.charge_kl(batch, grpo.Config(**keys))


def test_the_definitions():
    found = objective.metrics(a_batch(use_kl_in_reward=True, kl_penalty="abs"), kl_coef=0.5)
    assert found == pytest.approx(
        {
            "objective/scores": 3.0,
            "objective/entropy": (6.0 + 4.0) / 3,
            "objective/kl": (-0.3 + 0.4) / 3,
            "objective/non_score_reward": -0.5 * (0.9 + 0.4) / 3,
            "objective/rlhf_reward": 3.0 - 0.5 * (0.9 + 0.4) / 3,
            "objective/kl_per_token": (0.3 + 0.4 + 0.0) / 3,
            "objective/kl_coef": 0.5,
        }
    )
    assert found["objective/rlhf_reward"] == found["objective/scores"] + found["objective/non_score_reward"]


def test_without_a_kl_in_the_reward():
    found = objective.metrics(a_batch())
    assert found["objective/rlhf_reward"] == found["objective/scores"] == 3.0
    assert found["objective/non_score_reward"] == 0.0 and "objective/kl_per_token" not in found
    without_reference = objective.metrics(a_batch().with_(ref_logprobs=None))
    assert "objective/kl" not in without_reference and without_reference["objective/entropy"] == pytest.approx(10 / 3)


def test_they_do_not_see_the_ranks():
    batch = a_batch(use_kl_in_reward=True)
    whole = objective.metrics(batch, kl_coef=0.1)
    parts = [take(batch, rows)[0] for rows in ([2, 0], [], [1])]
    for found in on_ranks(lambda part, total: objective.metrics(part, total, 0.1), parts):
        assert found == pytest.approx(whole, abs=1e-12)


def test_the_variance_of_the_ratio():
    ratios = torch.from_numpy(np.random.default_rng(0).normal(1.0, 0.2, 50))
    found = metrics.finished(
        {"val/ratio": ratios.mean().item(), "val/ratio_spread": (ratios - 1).square().mean().item(), "loss": 7.0}
    )
    assert found.keys() == {"val/ratio", "val/ratio_var", "loss"} and found["loss"] == 7.0
    assert found["val/ratio_var"] == pytest.approx(ratios.var(unbiased=False).item(), abs=1e-12)
    assert metrics.finished({"val/ratio": 1.0, "val/ratio_spread": 0.0})["val/ratio_var"] == 0.0


def test_means_over_pairs():
    """Two pairs of 2 and 6 tokens."""
    assert metrics.finished({"pairs": 2 / 8, "pairs:beta": 0.2 / 8, "lr": 1.0}) == pytest.approx(
        {"beta": 0.1, "lr": 1.0}
    )
    assert metrics.finished({"pairs": 0.0, "pairs:beta": 0.0}) == {"beta": 0.0}
