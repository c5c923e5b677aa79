"""Rank 0's side of the rollout driver: starts the process, sends requests, turns its failures into exceptions."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megarl.config.root import TrainConfig
from megarl.errors import MegarlError
from megarl.parallel import device
from megarl.rollout.engine import log_excerpt
from megarl.rollout.frames import Reply, Request, decode, encode, frame, receive
from megarl.types import Completion, Rollout
from megarl.versions import check_vllm

_CLOSE_SECONDS = 30.0
_ERRORS = {"ValueError": ValueError, "MegarlError": MegarlError}
# What torchrun tells its workers: a vLLM server below one of them must not take it for its own.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_")


class Pending:
    """A request under way. `result()` waits for its end and raises what went wrong."""

    def __init__(self, driver: RolloutDriver, request_id: int, type: Any):
        self._driver, self._id, self._type = driver, request_id, type

    def wait_until_started(self) -> None:
        """For a sync: every engine is about to receive. Raises here, before the first collective, if one is dead."""
        self._driver._wait(self._id, until="started")

    def raise_if_failed(self) -> None:
        """Raise what went wrong, if anything has by now; never waits."""
        self._driver._look(self._id)

    def result(self) -> Any:
        return decode(self._driver._wait(self._id), self._type)


class RolloutDriver:
    """The driver process as rank 0 sees it, from one thread. Every method raises MegarlError when the driver died."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        check_vllm()
        self._log = run_dir / "logs" / "driver.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.num_engines = config.rollout.num_engines
        self._frees_cache = config.rollout.free_cache_engine
        self.engine_world_sizes = [config.rollout.tensor_model_parallel_size] * self.num_engines
        self.dataset_sizes: dict[str, int] = {}
        self._progress: Callable[[str], None] = lambda line: None
        self._replies: dict[int, list[Reply]] = {}
        self._next_id = 0
        self._closed = False
        self._channel, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "megarl.rollout.driver",
            "--channel",
            str(theirs.fileno()),
            "--owner",
            str(os.getpid()),
        ]
        with theirs, open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_driver_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is rank 0's to handle
            )
        gpu_ids = device.visible_gpu_ids() if device.HAS_CUDA else None
        if gpu_ids is not None and config.rollout.placement == "disaggregated":
            gpu_ids = gpu_ids[config.world_size // config.trainer.nnodes :]
        self._ready = self._request(
            "start",
            dict[str, int],
            config=config.model_dump(mode="json"),
            run_dir=str(run_dir.absolute()),
            gpu_ids=gpu_ids,
        )

    @classmethod
    def start(cls, config: TrainConfig, run_dir: Path) -> RolloutDriver:
        """Spawn driver and engines and return at once. MegarlError when this vLLM is not supported."""
        return cls(config, run_dir)

    def wait_until_ready(self, on_progress: Callable[[str], None]) -> None:
        """Wait until every engine answers and all data is loaded; `on_progress` gets lines meanwhile.

        Raises ValueError for bad data or rewards, MegarlError for an engine that cannot start (with its log).
        """
        self._progress = on_progress
        self.dataset_sizes = self._ready.result()

    def collect(self, num_prompts: int, step: int, greedy_baseline: bool = False) -> list[Rollout]:
        """The next prompts in order with `rollout.n` completions each, scored; seeded by trainer.seed and step.

        With `greedy_baseline`, each with the greedy completion of its prompt, scored, as its `baseline`.

        Raises ValueError when a reward function fails, MegarlError when the engines do.
        """
        return self._request(
            "collect", list[Rollout], num_prompts=num_prompts, step=step, greedy_baseline=greedy_baseline
        ).result()

    def validate(self, step: int) -> dict[str, list[Rollout]]:
        """The held-out prompts: {"sampled": rollouts, "greedy": rollouts}; {} without held-out files."""
        return self._request("validate", dict[str, list[Rollout]], step=step).result()

    def generate(
        self, prompts: list[np.ndarray], n: int, temperature: float, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """`n` completions for each prompt ([P] int32); temperature 0 is greedy. No rewards."""
        return self._request(
            "generate",
            list[list[Completion]],
            prompts=prompts,
            n=n,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        ).result()

    def init_weight_transfer(self, init_infos: list[dict[str, Any]]) -> Pending:
        """Give engine i's workers `init_infos[i]`; they join the transfer group while the result is pending."""
        return self._request("init_weight_transfer", None, init_infos=init_infos)

    def begin_sync(self, version: int, digests: list[str], audited: bool) -> Pending:
        """Let every engine receive weights. The result is there when all sample with them.

        Args:
            digests: of each engine's plan, which its workers compare with theirs.
            audited: whether workers report what they hold and wait for a verdict.
        """
        return self._request("sync", None, version=version, digests=digests, audited=audited)

    def score(self, sequences: list[np.ndarray]) -> list[list[np.ndarray]]:
        """[engine][sequence] -> [T - 1] float32, the engine's log-probs of the sequence's own tokens ([T] int32)."""
        return self._request("score", list[list[np.ndarray]], sequences=sequences).result()

    def sleep(self) -> None:
        """Engines give their GPU memory to the trainer, where `rollout.free_cache_engine` asks for it."""
        if self._frees_cache:
            self._request("sleep", None).result()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        if self._frees_cache:
            self._request("wake_up", None).result()

    def close(self) -> None:
        """End engines and driver and wait until they are gone. May be called again, and after any failure."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> RolloutDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _request(self, method: str, type: Any, **params: Any) -> Pending:
        self._next_id += 1
        self._replies[self._next_id] = []
        try:
            self._channel.sendall(frame(encode(Request(self._next_id, method, msgspec.Raw(encode(params))))))
        except OSError:
            raise self._death() from None
        return Pending(self, self._next_id, type)

    def _wait(self, request_id: int, until: str = "result") -> msgspec.Raw:
        """Read frames until the request has its reply of kind `until` (or its last one); raise if that is an error."""
        replies = self._replies[request_id]
        while not any(reply.kind in (until, "result", *_ERRORS) for reply in replies):
            self._receive()
        reply = next(reply for reply in replies if reply.kind in (until, "result", *_ERRORS))
        if until == "result":
            reply = replies[-1]
            del self._replies[request_id]
        if reply.kind in _ERRORS:
            raise _ERRORS[reply.kind](decode(reply.value, str))
        return reply.value

    def _look(self, request_id: int) -> None:
        while select.select([self._channel], [], [], 0)[0]:
            self._receive()
        if any(reply.kind in _ERRORS for reply in self._replies[request_id]):
            self._wait(request_id)

    def _receive(self) -> None:
        try:
            reply = decode(receive(self._channel), Reply)
        except (EOFError, OSError):
            raise self._death() from None
        if reply.kind == "progress":
            self._progress(decode(reply.value, str))
        else:
            self._replies[reply.id].append(reply)

    def _death(self) -> MegarlError:
        if self._closed:
            return MegarlError("the rollout driver has been closed")
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            status = "unknown: it closed its channel and still runs"
        return MegarlError(f"the rollout driver died (exit status {status}){log_excerpt(self._log)}")


def _driver_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
