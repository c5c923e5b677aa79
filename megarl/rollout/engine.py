"""One vLLM server: its command line and environment, its start under a supervisor, its readiness, its end.

The server listens on a Unix socket in a private folder and writes to `<run_dir>/logs/engine_<i>.log`. A supervisor
(supervisor.py) holds it by a pipe to this process, so that it cannot outlive us.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.config.root import TrainConfig
from megarl.errors import MegarlError
from megarl.rollout.client import MODEL_NAME, EngineClient, Sampling

_GRACE_SECONDS = 5.0
_PROGRESS_SECONDS = 5.0
_LOG_TAIL_LINES = 15
_LONGEST_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its closing zero
_CPU_BATCHED_TOKENS = 8192
# "ValueError: ..." or, below pydantic's "ValidationError: 1 validation error for ...", "Value error, ..."
_CAUSE = re.compile(r"\s*(?:(?:\w+\.)*\w*(?:Error|Exception|Interrupt): |Value error, )\S")
_NO_CAUSE = re.compile(r"root cause|\d validation errors? for ")


@dataclass(frozen=True)
class Placement:
    """Where engines run: on the CPU (`gpu_ids` None), or each on the next tensor_model_parallel_size of these GPUs."""

    gpu_ids: list[str] | None

    def of_engine(self, index: int, size: int) -> list[str] | None:
        if self.gpu_ids is None:
            return None
        mine = self.gpu_ids[index * size : (index + 1) * size]
        if len(mine) < size:
            raise ValueError(
                f"engine {index} needs {size} GPU(s) of its own and this node shows {len(self.gpu_ids)}; lower "
                "rollout.num_engines or rollout.tensor_model_parallel_size, or check CUDA_VISIBLE_DEVICES"
            )
        return mine


class SocketFolder:
    """The 0700 folder of the engines' sockets: a new private one, or `rollout.socket_dir`, for one run at a time."""

    def __init__(self, socket_dir: str | None):
        self.is_temporary = socket_dir is None
        self.path = Path(tempfile.mkdtemp(prefix="megarl-") if socket_dir is None else socket_dir).absolute()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MegarlError(
                f"the socket folder {self.path} belongs to another run that is still alive; end it, or give this run "
                "another rollout.socket_dir (or none: each run then makes a private folder)"
            ) from None

    def claim(self, index: int) -> Path:
        """A free socket path for engine `index`. A socket without a listener is left over from a crash and removed."""
        path = self.path / f"engine_{index}.sock"
        size = len(os.fsencode(path))
        if size > _LONGEST_SOCKET_PATH:
            raise ValueError(
                f"the socket path {path} has {size} bytes and the kernel takes {_LONGEST_SOCKET_PATH}; "
                "set rollout.socket_dir (or TMPDIR) to a shorter path"
            )
        if not path.exists():
            return path
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
                return path
        raise MegarlError(
            f"the socket {path} is taken: another process listens on it; end that process or change rollout.socket_dir"
        )


class Engine:
    """A vLLM server process and the client that talks to it."""

    def __init__(self, index: int, config: TrainConfig, run_dir: Path, sockets: SocketFolder, placement: Placement):
        self.name = f"engine {index}"
        self.log = run_dir / "logs" / f"engine_{index}.log"
        self._config = config.rollout
        self._socket = sockets.claim(index)
        self._remove = [self._socket] + ([sockets.path] if sockets.is_temporary else [])
        gpus = placement.of_engine(index, config.rollout.tensor_model_parallel_size)
        self._command = server_command(config, self._socket, on_cuda=gpus is not None)
        self._environment = os.environ | server_environment(config, gpus)
        self._process: asyncio.subprocess.Process | None = None
        self.client = EngineClient(self.name, os.fspath(self._socket), config.rollout.request_timeout_seconds)

    async def start(self) -> None:
        """Spawn the supervisor, which spawns the server; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = [sys.executable, "-m", "megarl.supervisor", "--owner", str(os.getpid())]
        supervisor += ["--grace", str(_GRACE_SECONDS), *(f"--remove={path}" for path in self._remove), "--"]
        with open(self.log, "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *supervisor,
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    async def wait_until_ready(self, on_progress: Callable[[str], None]) -> None:
        """Wait for the first answer. MegarlError with the log's last lines when it dies or takes too long."""
        started, reported = time.monotonic(), 0.0
        while not await self.client.healthy():
            waited = time.monotonic() - started
            if not self.is_alive:
                raise self.failure("could not start")
            if waited > self._config.start_timeout_seconds:
                raise self.failure(
                    f"did not answer within rollout.start_timeout_seconds={self._config.start_timeout_seconds:g}"
                )
            if waited - reported >= _PROGRESS_SECONDS:
                reported = waited
                on_progress(f"{self.name}: starting vLLM, {waited:.0f} s")
            await asyncio.sleep(0.2)
        await self._warm_up()
        on_progress(f"{self.name}: ready after {time.monotonic() - started:.0f} s")

    async def _warm_up(self) -> None:
        """The first request pays for lazy imports and buffers (seconds on the CPU), and finds what a start does not: an
        attention kernel without this head size, memory that does not suffice."""
        try:
            await self.client.complete(np.zeros(1, np.int32), Sampling(n=2, temperature=1.0, max_tokens=2, seed=0))
        except MegarlError as error:
            await self.died_within(_GRACE_SECONDS)
            raise self.failure(f"started but could not answer its first request: {error}") from None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def died_within(self, seconds: float) -> bool:
        """Whether the server is gone, or ends in the next `seconds`: its connections break before the process does."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        return not self.is_alive

    def failure(self, what: str) -> MegarlError:
        """What happened to this engine, its exit status, the causes in its log, its last lines and its path."""
        status = "" if self.is_alive or self._process is None else f" (exit status {self._process.returncode})"
        return MegarlError(f"{self.name} {what}{status}{log_excerpt(self.log)}")

    async def close(self) -> None:
        """Close the lifeline and wait until the supervisor has ended everything."""
        await self.client.close()
        if self._process is not None:
            self._process.stdin.close()
            await self._process.wait()


def server_command(config: TrainConfig, socket_path: Path, on_cuda: bool) -> list[str]:
    """The arguments of `vllm serve`, spelled as a module because the CPU build's `vllm` command does not start."""
    rollout, model = config.rollout, config.actor.model
    flags = {
        "model": _model_path(model.path),
        "served-model-name": MODEL_NAME,
        "uds": str(socket_path),
        "dtype": rollout.dtype or model.dtype,
        "seed": config.trainer.seed,
        "max-model-len": config.max_sequence_length,
        "max-num-seqs": rollout.max_num_seqs,
        "tensor-parallel-size": rollout.tensor_model_parallel_size,
        "logprobs-mode": "processed_logprobs",  # of the distribution sampled from: at the temperature
        "weight-transfer-config": '{"backend": "megarl"}',
        "uvicorn-log-level": "warning",
    }
    switches = ["disable-log-stats", "disable-uvicorn-access-log", "no-enable-log-requests"]
    if rollout.enforce_eager:
        switches.append("enforce-eager")
    if on_cuda:
        flags["gpu-memory-utilization"] = rollout.gpu_memory_utilization
        if rollout.free_cache_engine:
            switches.append("enable-sleep-mode")
    else:
        flags["kv-cache-memory-bytes"] = rollout.kv_cache_memory_mib << 20
        # A seeded request whose prompt is prefilled in chunks kills vLLM 0.32's CPU worker ("CPU Generator does not use
        # offset"), so prompts are prefilled whole; the token budget then has to hold the longest.
        switches.append("no-enable-chunked-prefill")
        flags["max-num-batched-tokens"] = max(_CPU_BATCHED_TOKENS, config.max_sequence_length)
        if rollout.tensor_model_parallel_size == 1:
            flags["distributed-executor-backend"] = "uni"
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *(f"--{name}" for name in switches)]


def server_environment(config: TrainConfig, gpus: list[str] | None) -> dict[str, str]:
    """What the server's environment has beyond ours."""
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-transfer, pause and sleep routes
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
        # Longer than the client keeps an idle connection: else the server may close one that is just being written to.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
    }
    if os.path.isdir(config.actor.model.path):
        environment |= {"HF_HUB_OFFLINE": "1"}
    if gpus is not None:
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if config.rollout.tensor_model_parallel_size == 1:
        # Lets the CPU platform keep the "uni" executor: the model runs in the engine core's process. One process and
        # about 10 s of start less, and a third less time per step than with two processes polling each other.
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return environment


def log_excerpt(log: Path) -> str:
    """The causes that a log names (its distinct last error lines), its last lines, and where it is."""
    if not log.exists():
        return f"; no log was written ({log})"
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [re.sub(r"^\((?:APIServer|EngineCore|Worker)[^)]*\) ", "", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r"^(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?", "", line) for line in lines]
    lines = [line for line in lines if line.strip()]
    causes = [line.strip() for line in lines if _CAUSE.match(line)]
    causes = [cause for cause in dict.fromkeys(causes) if not _NO_CAUSE.search(cause)][-3:]
    parts = [f": {cause}" for cause in causes[:1]] + [f"\n  also: {cause}" for cause in causes[1:]]
    tail = "".join(f"\n  | {line[:300]}" for line in lines[-_LOG_TAIL_LINES:])
    return f"{''.join(parts)}\nthe last lines of {log}:{tail}"


def _model_path(path: str) -> str:
    return os.path.abspath(path) if os.path.isdir(path) else path
