"""What a run says of itself: samples, alarms, and how its reward went."""

import json

import pytest

from megarl.observability.report import Reporter, first_and_last, ratio_alarm
from tests.observability.rollouts import rollout


def test_a_run_s_samples_alarms_and_summary(tiny_config, tmp_path, capsys):
    config = tiny_config({"trainer": {"sample_table_freq": 2}, "rollout": {"temperature": 0.7}})
    with Reporter(config, tmp_path, speaks=True, quiet=False) as report:
        for step, (reward, ratio) in enumerate([(0.25, 1.0), (0.5, 2.5)], start=1):
            metrics = {"objective/rlhf_reward": reward, "parity/max_abs_logprob": 0.0, "val/ratio": ratio}
            report.step(step, [rollout([0.1, 0.9], [2, 9])], metrics, {"update": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["temperature"], row["score"]) for row in rows] == [(2, 0.7, 0.1), (2, 0.7, 0.9)]
    told = capsys.readouterr().out
    assert "at temperature 0.7" in told
    assert "step 2: warning: val/ratio is 2.5" in told and "step 1: warning" not in told
    assert "objective/rlhf_reward rose: 0.250 -> 0.500" in told
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rlhf_reward_first"], summary["rlhf_reward_last"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("ratio", "alarms"), [(1.0, False), (0.1, False), (2.0, False), (0.09, True), (2.1, True), (0.0, False)]
)
def test_the_ratio_alarm(ratio, alarms):
    assert (ratio_alarm({"val/ratio": ratio}) is not None) == alarms
    assert ratio_alarm({"lr": 1.0}) is None  # the critic's warm-up, and OnlineDPO


def test_first_and_last_are_means_over_a_tenth():
    assert first_and_last([3.0]) == (3.0, 3.0)
    assert first_and_last([*range(20)]) == (0.5, 18.5)
