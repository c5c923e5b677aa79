"""The driver process with one real engine, from rank 0's side."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from megarl.errors import MegarlError
from megarl.rollout.handle import RolloutDriver
from megarl.rollout.replay import load
from tests.rollout.processes import alive, descendants, naming, wait_until
from tests.rollout.test_frames import same

TRAINER = """
import json, pathlib, sys, time
from megarl.config.root import TrainConfig
from megarl.rollout.handle import RolloutDriver
folder = pathlib.Path(sys.argv[1])
driver = RolloutDriver.start(TrainConfig.model_validate(json.loads((folder / "config.json").read_text())), folder)
time.sleep(600)
"""


def tokens(rollouts):
    return [[completion.token_ids.tolist() for completion in rollout.completions] for rollout in rollouts]


def test_ready(driver):
    assert driver.dataset_sizes == {"train": 12, "val": 5}
    assert (driver.num_engines, driver.engine_world_sizes) == (1, [1])
    assert driver.progress_lines[-1].startswith("engine 0: ready after")
    assert any(line.startswith("engine 0: starting vLLM, ") for line in driver.progress_lines[:-1])


def test_collect_groups_scores_and_stamps(driver, tiny_config):
    rollouts = driver.collect(8, step=0)
    assert len({rollout.prompt.id for rollout in rollouts}) == 8
    for rollout in rollouts:
        assert rollout.prompt.columns["level"] == rollout.prompt.id
        assert len(rollout.completions) == len(rollout.texts) == 4
        assert len({tuple(completion.token_ids) for completion in rollout.completions}) == 4
        lengths = np.array([len(text) for text in rollout.texts], np.float64)
        np.testing.assert_array_equal(rollout.rewards["spy"], lengths)
        np.testing.assert_allclose(rollout.scores, 0.5 * lengths + rollout.rewards["exact_match"])
        for completion, text in zip(rollout.completions, rollout.texts):
            assert completion.weight_version.tolist() == [0] * len(completion.token_ids)
            assert "<|" not in text and len(text) <= len(completion.token_ids)
        assert not rollout.rewards["spy/megatron"].any()  # reward workers do not load Megatron-core


def test_a_greedy_baseline_comes_with_its_prompt_and_score(driver):
    rollouts = driver.collect(4, step=2, greedy_baseline=True)
    greedy = driver.generate([r.prompt.token_ids for r in rollouts], 1, 0.0, 8, seed=0)
    for rollout, expected in zip(rollouts, greedy):
        assert len(rollout.completions) == 4 and rollout.baseline.prompt.id == rollout.prompt.id
        assert tokens([rollout.baseline]) == [[expected[0].token_ids.tolist()]]
        exact = rollout.baseline.rewards["exact_match"][0]
        assert rollout.baseline.scores[0] == 0.5 * len(rollout.baseline.texts[0]) + exact
    assert all(rollout.baseline is None for rollout in driver.collect(1, step=3))


def test_the_same_prompt_twice_in_a_step_gets_other_completions(driver):
    rollouts = driver.collect(24, step=1)  # of 12 prompts
    by_prompt = {}
    for rollout, ids in zip(rollouts, tokens(rollouts)):
        by_prompt.setdefault(rollout.prompt.id, []).append(str(ids))
    assert max(map(len, by_prompt.values())) >= 2
    assert all(len(set(draws)) == len(draws) for draws in by_prompt.values())


def test_validation_is_repeatable(driver):
    first, second = driver.validate(0), driver.validate(7)
    assert {kind: [len(rollout.completions) for rollout in group] for kind, group in first.items()} == {
        "sampled": [2] * 5,
        "greedy": [1] * 5,
    }
    assert [rollout.prompt.id for rollout in first["greedy"]] == list(range(5))
    assert same(first, second)


def test_generate(driver):
    prompts = [np.array([3, 20, 31], np.int32), np.array([3, 20, 31], np.int32)]
    groups = driver.generate(prompts, n=3, temperature=1.0, max_tokens=4, seed=1)
    assert same(groups, driver.generate(prompts, n=3, temperature=1.0, max_tokens=4, seed=1))
    ids = [[completion.token_ids.tolist() for completion in group] for group in groups]
    assert ids[0] != ids[1]
    assert not same(groups, driver.generate(prompts, n=3, temperature=1.0, max_tokens=4, seed=2))
    assert driver.generate([], n=3, temperature=1.0, max_tokens=4, seed=1) == []


def test_engine_refusals_reach_rank_0_and_do_no_harm(driver):
    with pytest.raises(MegarlError, match="engine 0 refused /v1/completions"):
        driver.generate([np.full(40, 9, np.int32)], n=1, temperature=1.0, max_tokens=4, seed=1)
    assert len(driver.generate([np.array([9], np.int32)], n=1, temperature=1.0, max_tokens=4, seed=1)) == 1


def test_recording(driver, record_dir):
    rollouts = driver.collect(3, step=70)
    assert same(load(record_dir, 70), rollouts)


def test_a_reward_that_raises_is_counted_and_told(driver, spy_fails):
    with spy_fails:
        rollouts = driver.collect(2, step=3)
    assert [rollout.events["spy/errors"] for rollout in rollouts] == [4, 4]
    assert not any(rollout.rewards["spy"].any() for rollout in rollouts)
    told = [line for line in driver.progress_lines if line.startswith("reward function 'spy'")]
    assert len(told) == 1 and "of data source 'sums'" in told[0] and "raised OSError: asked to" in told[0]
    assert not any(sum(rollout.events.values()) for rollout in driver.collect(2, step=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"prompt_key": "question"}}, "has no question column"),
        ({"reward": {"functions": ["no_such_rule"]}}, "reward function 'no_such_rule' is unknown"),
        ({"reward": {"functions": ["exact_match", "exact_match"]}}, "reward.functions names 'exact_match' twice"),
    ],
)
def test_bad_input_is_a_value_error_and_leaves_nothing(tiny_config, tmp_path, changes, message):
    config = tiny_config(changes | {"rollout": {"socket_dir": str(tmp_path / "s")}})
    with RolloutDriver.start(config, tmp_path) as driver:
        tree = descendants(driver._process.pid)
        with pytest.raises(ValueError, match=message):
            driver.wait_until_ready(lambda line: None)
    assert not alive(tree) and not naming(str(tmp_path))


def test_rank_0_killed_while_engines_start(tiny_config, tmp_path):
    """SIGKILL of the trainer: the driver sees its channel end, and nothing of the tree stays."""
    config = tiny_config({"rollout": {"socket_dir": str(tmp_path / "s")}})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)])
    assert wait_until(lambda: len(descendants(trainer.pid)) >= 4, 60)
    tree = descendants(trainer.pid)
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: not alive(tree) and not naming(str(tmp_path)), 20), alive(tree)


def test_driver_killed(tiny_config, tmp_path):
    config = tiny_config({"rollout": {"socket_dir": str(tmp_path / "s")}})
    with RolloutDriver.start(config, tmp_path) as driver:
        driver.wait_until_ready(lambda line: None)
        tree = descendants(driver._process.pid)
        assert len(tree) >= 4  # driver, supervisor, server, its engine core
        kill_and_expect_nothing_left(driver, tree, tmp_path)


@pytest.mark.slow
def test_engine_killed_then_driver_killed(tiny_config, tmp_path):
    """Two engines. One dies: the other takes its work, and a sync names the dead. The driver dies: nothing stays."""
    config = tiny_config({"rollout": {"socket_dir": str(tmp_path / "s"), "num_engines": 2}})
    with RolloutDriver.start(config, tmp_path) as driver:
        driver.wait_until_ready(lambda line: None)
        driver.collect(8, step=0)
        tree = descendants(driver._process.pid)
        for pid, _ in naming(f"{tmp_path}/s/engine_1.sock") - naming("megarl.supervisor"):
            os.kill(pid, signal.SIGKILL)
        assert len(driver.collect(8, step=1)) == 8
        pending = driver.begin_sync(1, ["", ""], audited=True)
        with pytest.raises(MegarlError, match=r"engine 1 died \(exit status 137\)[\s\S]*logs/engine_1.log"):
            pending.wait_until_started()
        kill_and_expect_nothing_left(driver, tree, tmp_path)


def kill_and_expect_nothing_left(driver, tree, folder):
    os.kill(driver._process.pid, signal.SIGKILL)
    with pytest.raises(MegarlError, match=r"the rollout driver died \(exit status -9\)[\s\S]*logs/driver.log"):
        driver.collect(8, step=2)
    assert wait_until(lambda: not alive(tree) and not naming(str(folder)), 20), alive(tree)
