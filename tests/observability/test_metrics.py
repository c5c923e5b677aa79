from dataclasses import replace

import pytest

from megarl.observability.metrics import Phases, rollout_metrics
from tests.observability.rollouts import rollout


def test_phases_add_up_by_name_and_start_anew():
    ticks = iter([0.0, 1.0, 10.0, 12.5, 20.0, 20.5])
    phases = Phases(lambda: next(ticks))
    with phases("generate"):
        pass
    with phases("update"):
        pass
    with phases("generate"):
        pass
    assert phases.seconds() == {"generate": 1.5, "update": 2.5}
    assert list(phases.seconds()) == ["generate", "update"]
    phases.reset()
    assert phases.seconds() == {}


def test_a_phase_that_raises_is_timed_and_the_error_passes():
    ticks = iter([0.0, 3.0])
    phases = Phases(lambda: next(ticks))
    with pytest.raises(KeyError), phases("sync"):
        raise KeyError("engine")
    assert phases.seconds() == {"sync": 3.0}


def test_failures_of_reward_functions_are_counted():
    failed = [replace(rollout([0.0, 1.0], [2, 9]), events={"sums/timeouts": n, "sums/errors": 0}) for n in (1, 2)]
    metrics = rollout_metrics(failed)
    assert (metrics["reward/sums/timeouts"], metrics["reward/sums/errors"]) == (3.0, 0.0)


def test_rollout_metrics_by_hand():
    metrics = rollout_metrics([rollout([1.0, 0.0], [2, 9]), rollout([0.25, 0.25], [4, 5])])
    assert metrics == {
        "objective/scores": 0.375,
        "reward/sums": 0.75,
        "reward/sums/acc": 0.25,
        "rollout/score_std_in_group": 0.25,
        "rollout/zero_variance_groups": 0.5,
        "rollout/finished_share": 0.75,
        "val/contain_eos_token": 0.75,
        "val/num_eos_tokens": 3.0,
        "rollout/completions": 4.0,
        "rollout/tokens": 20.0,
        "response_length/mean": 5.0,
        "response_length/min": 2.0,
        "response_length/max": 9.0,
        "prompt_length/mean": 3.0,
    }
    assert all(type(value) is float for value in metrics.values())


def test_groups_of_different_size_weigh_by_completions():
    assert rollout_metrics([rollout([1.0], [1]), rollout([0.0, 0.0, 0.0], [1, 1, 1])])["objective/scores"] == 0.25


def test_no_rollouts_is_an_error():
    with pytest.raises(ValueError, match="train_batch_size"):
        rollout_metrics([])
