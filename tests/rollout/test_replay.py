"""Recorded rollouts, read back bit by bit."""

import pytest

from megarl.rollout import replay
from tests.rollout.test_frames import a_rollout, same


@pytest.fixture
def recorded(tmp_path):
    folder = tmp_path / "record"
    rollouts = [[a_rollout(n=4, tokens=step + i) for i in range(8)] for step in range(3)]
    for step, of_step in enumerate(rollouts):
        replay.record(folder, step, of_step)
    return folder, rollouts


def test_replay_gives_back_every_step(recorded, tiny_config, tmp_path):
    folder, rollouts = recorded
    assert sorted(file.name for file in folder.iterdir()) == [f"step_00000{step}.msgpack" for step in range(3)]
    with replay.ReplayDriver.start(tiny_config({"rollout": {"replay_dir": str(folder), "n": 4}}), tmp_path) as driver:
        lines = []
        driver.wait_until_ready(lines.append)
        assert lines == [f"replaying 3 recorded steps from {folder}"]
        for step in (2, 0, 1):
            assert same(driver.collect(8, step), rollouts[step])
        assert (driver.num_engines, driver.engine_world_sizes, driver.validate(0)) == (0, [], {})
        pending = driver.begin_sync(1, [], audited=True)
        pending.wait_until_started()
        assert pending.result() is None


def test_missing_and_wrong_recordings(recorded, tiny_config, tmp_path):
    folder, _ = recorded
    driver = replay.ReplayDriver.start(tiny_config({"rollout": {"replay_dir": str(folder), "n": 4}}), tmp_path)
    with pytest.raises(
        ValueError,
        match=r"no recorded rollouts for step 3: .*step_000003.msgpack does not exist \(it holds step_000000",
    ):
        driver.collect(8, 3)
    with pytest.raises(
        ValueError, match="holds 8 prompts with .4. completions each; this run wants data.train_batch_size=9"
    ):
        driver.collect(9, 0)
    (folder / "step_000002.msgpack").rename(folder / "step_000004.msgpack")
    with pytest.raises(ValueError, match="holds step 2, not 4"):
        driver.collect(8, 4)
    (folder / "step_000005.msgpack").write_bytes((folder / "step_000000.msgpack").read_bytes()[:-10])
    with pytest.raises(ValueError, match="is not a recording of rollouts"):
        driver.collect(8, 5)
    empty = replay.ReplayDriver.start(
        tiny_config({"rollout": {"replay_dir": str(tmp_path / "none"), "n": 4}}), tmp_path
    )
    with pytest.raises(ValueError, match="rollout.replay_dir=.*none holds no step"):
        empty.wait_until_ready(print)
