"""Which rollout driver a rank has: the real one, one that replays recorded rollouts, or (off rank 0) none."""

from __future__ import annotations

from pathlib import Path

from megarl.config.root import TrainConfig
from megarl.rollout.handle import RolloutDriver
from megarl.rollout.replay import ReplayDriver


class AbsentDriver:
    """What ranks other than 0 hold, so that the loop reads the same on all: every request is rank 0's to make."""

    num_engines = 0
    dataset_sizes: dict[str, int] = {}

    def wait_until_ready(self, on_progress) -> None:
        """Rank 0 waits; the first collective then holds the others."""

    def collect(self, num_prompts: int, step: int, greedy_baseline: bool = False) -> None:
        """None: `distribute` brings this rank its share."""

    def validate(self, step: int) -> dict:
        """Nothing to report here."""
        return {}

    def sleep(self) -> None:
        """Rank 0 puts the engines to sleep."""

    def wake_up(self) -> None:
        """Rank 0 wakes them."""

    def __enter__(self) -> AbsentDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def start_driver(config: TrainConfig, run_dir: Path, on_rank_0: bool) -> RolloutDriver | ReplayDriver | AbsentDriver:
    """Start what this rank needs; returns at once, the engines load meanwhile."""
    if not on_rank_0:
        return AbsentDriver()
    if config.rollout.replay_dir is not None:
        return ReplayDriver(config, run_dir)
    return RolloutDriver.start(config, run_dir)
