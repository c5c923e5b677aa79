"""Record the rollouts of every step, and train from such a recording without engines.

One file per step, `step_000000.msgpack`, in the encoding of rollout/frames.py. A replayed run sees bitwise the same
rollouts whatever its parallel layout: that is how layouts are compared, and how a step is debugged without vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megarl.config.root import TrainConfig
from megarl.rollout.frames import decode, encode
from megarl.types import Completion, Rollout


class Recording(msgspec.Struct, tag="megarl-rollouts-1"):
    step: int
    rollouts: list[Rollout]


def record(folder: Path, step: int, rollouts: list[Rollout]) -> Path:
    """Write one step's rollouts; the file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = step_file(folder, step)
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(Recording(step, rollouts)))
    os.replace(partial, path)
    return path


def load(folder: Path, step: int) -> list[Rollout]:
    """One recorded step. ValueError when its file is missing or is no recording of that step."""
    path = step_file(folder, step)
    if not path.is_file():
        found = sorted(file.name for file in folder.glob("step_*.msgpack")) if folder.is_dir() else []
        has = f"it holds {found[0]} to {found[-1]}" if found else "it holds no recording"
        raise ValueError(
            f"no recorded rollouts for step {step}: {path} does not exist ({has}); record with "
            "rollout.record_dir over at least as many steps (trainer.total_steps)"
        )
    try:
        recording = decode(path.read_bytes(), Recording)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a recording of rollouts: {error}") from None
    if recording.step != step:
        raise ValueError(f"{path} holds step {recording.step}, not {step}; was it renamed?")
    return recording.rollouts


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.msgpack"


class Done:
    """A Pending with nothing to wait for."""

    def wait_until_started(self) -> None:
        pass

    def result(self) -> None:
        pass


class ReplayDriver:
    """RolloutDriver's interface over `rollout.replay_dir`: no engines, no validation, nothing to sync."""

    num_engines = 0
    engine_world_sizes: list[int] = []

    def __init__(self, config: TrainConfig, run_dir: Path):
        assert config.rollout.replay_dir is not None
        self._folder = Path(config.rollout.replay_dir)
        self._n = config.rollout.n
        self.dataset_sizes = {"train": 0, "val": 0}

    @classmethod
    def start(cls, config: TrainConfig, run_dir: Path) -> ReplayDriver:
        return cls(config, run_dir)

    def wait_until_ready(self, on_progress: Callable[[str], None]) -> None:
        """ValueError when the folder holds no recording."""
        steps = sorted(self._folder.glob("step_*.msgpack")) if self._folder.is_dir() else []
        if not steps:
            raise ValueError(f"rollout.replay_dir={self._folder} holds no step_*.msgpack; name a former record_dir")
        on_progress(f"replaying {len(steps)} recorded steps from {self._folder}")

    def collect(self, num_prompts: int, step: int, greedy_baseline: bool = False) -> list[Rollout]:
        """The recorded rollouts of `step`.

        ValueError when missing, of another size than this run's batch, or without the baselines that it needs.
        """
        rollouts = load(self._folder, step)
        sizes = {len(rollout.completions) for rollout in rollouts}
        if len(rollouts) != num_prompts or sizes != {self._n}:
            raise ValueError(
                f"{step_file(self._folder, step)} holds {len(rollouts)} prompts with {sorted(sizes)} completions each; "
                f"this run wants data.train_batch_size={num_prompts} and rollout.n={self._n}"
            )
        if greedy_baseline and any(rollout.baseline is None for rollout in rollouts):
            raise ValueError(
                f"{step_file(self._folder, step)} holds no greedy completions, which this run's algorithm compares "
                "with; record with the same algorithm.name"
            )
        return rollouts

    def validate(self, step: int) -> dict[str, list[Rollout]]:
        return {}

    def generate(
        self, prompts: list[np.ndarray], n: int, temperature: float, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        raise ValueError("a replayed run (rollout.replay_dir) has no engines to generate with")

    def init_weight_transfer(self, init_infos: list[dict[str, Any]]) -> Done:
        return Done()

    def begin_sync(self, version: int, digests: list[str], audited: bool) -> Done:
        return Done()

    def sleep(self) -> None:
        pass

    def wake_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> ReplayDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
