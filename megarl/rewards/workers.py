"""Reward functions in worker processes that can be killed: no function can hang, crash or corrupt the rollout driver.

A call that misses its deadline ends with its worker, which is replaced; so does one that takes its worker down. The
completions of a failed call are then scored one by one, so that only the guilty ones go without. What happened is
counted under a name and told (`Graded`): `timeouts`, `crashes`, `errors` (it raised), `invalid` (no finite number).

Each worker (rewards/worker.py) runs below a supervisor of its own: whatever a reward function started ends with its
worker, and all of it with the driver. Requests and replies are msgpack over a socket pair; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from megarl.errors import MegarlError
from megarl.rewards import label
from megarl.rewards.worker import LENGTH, Function, Raised, Ready, Refused, Reply, Request, Scored, encode

if TYPE_CHECKING:
    from megarl.config.rollout import RewardConfig

EVENTS = ("timeouts", "crashes", "errors", "invalid")
_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Sample:
    """What the functions are called with about one prompt and its completions; `each` holds lists of one length."""

    prompt_id: int
    data_source: str
    each: dict[str, list[Any]]  # "completions", "prompts", "finish_reason", "completion_ids"
    shared: dict[str, Any]  # the prompt's columns

    @property
    def texts(self) -> list[str]:
        return self.each["completions"]

    def only(self, place: int) -> Sample:
        """The same prompt with one of its completions."""
        each = {name: [values[place]] for name, values in self.each.items()}
        return Sample(self.prompt_id, self.data_source, each, self.shared)


@dataclass
class Graded:
    """One function's scores of some completions. A failed completion has the default score, and 0 for further keys."""

    columns: dict[str, list[float]]  # "score" and the function's further keys
    events: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)  # one for each event


@dataclass(frozen=True)
class _Failure:
    """A call without a result."""

    event: str
    what: str  # "raised ValueError: ...", "did not return within 30 s"
    traceback: str = ""


class RewardWorkers:
    """The configured reward functions, called in worker processes. `start` first, `close` last."""

    def __init__(self, config: RewardConfig):
        self._config = config
        self.names = [label(spec) for spec in config.functions]
        self._functions = [Function(spec.name, spec.kwargs, spec.conversational) for spec in config.functions]
        self._deadlines = [config.timeout_seconds for _ in config.functions]
        self._compares = [False] * len(self.names)
        self._failed_in_a_row = [0] * len(self.names)
        self._free = asyncio.Semaphore(config.num_workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def start(self) -> None:
        """Start a first worker. ValueError when a function does not exist, its file fails on import, or two share a
        name."""
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(
                    f"reward.functions names {name!r} twice; metrics go by that name, so rename one of the functions"
                )
        worker = await self._spawn()
        self._idle.append(worker)

    async def score(self, function: int, sample: Sample) -> Graded:
        """The scores of all completions of `sample` by the function at this place of `reward.functions`.

        Raises ValueError when the function returns another number of values than completions, or raises CannotScore;
        when it fails on a completion and `reward.on_error` is "stop"; when it has failed on
        `reward.max_consecutive_failures` completions in a row. MegarlError when it raises that.
        """
        result = await self._call(function, sample)
        if isinstance(result, _Failure) and len(sample.texts) > 1 and not self._compares[function]:
            places = range(len(sample.texts))
            alone = await asyncio.gather(*(self._call(function, sample.only(place)) for place in places))
            return self._joined(function, [self._graded(function, sample.only(k), alone[k]) for k in places])
        return self._graded(function, sample, result)

    async def close(self) -> None:
        """End every worker and wait until it is gone."""
        for worker in self._all:
            worker.kill()
        await asyncio.gather(*(worker.exit_status() for worker in self._all))

    def _graded(self, function: int, sample: Sample, result: Scored | _Failure) -> Graded:
        """A result with its failed completions at the default score; raises where the run is to stop."""
        default = self._config.default_score
        if isinstance(result, _Failure):
            failures = dict.fromkeys(range(len(sample.texts)), result)
            graded = Graded({"score": [default] * len(sample.texts)})
        else:
            failures = {place: _Failure("invalid", f"returned {what}") for place, what in result.invalid.items()}
            graded = Graded(result.columns)
            for place in failures:
                graded.columns["score"][place] = default
        for place, failure in failures.items():
            message = f"{self._who(function, sample, place)} {failure.what}"
            graded.events[failure.event] += 1
            graded.messages.append(message)
            if self._config.on_error == "stop":
                raise ValueError(message + failure.traceback)
        self._count_in_a_row(function, graded, len(sample.texts), next(iter(failures.values()), None))
        return graded

    def _count_in_a_row(self, function: int, graded: Graded, completions: int, failure: _Failure | None) -> None:
        """ValueError when the function has failed too often without a success between."""
        failed = graded.events.total()
        self._failed_in_a_row[function] = self._failed_in_a_row[function] + failed if failed == completions else 0
        if failure is not None and self._failed_in_a_row[function] >= self._config.max_consecutive_failures:
            raise ValueError(
                f"reward function {self.names[function]!r} has failed on {self._failed_in_a_row[function]} completions "
                f"in a row (reward.max_consecutive_failures={self._config.max_consecutive_failures}); "
                f"the last failure: {graded.messages[-1]}{failure.traceback}"
            )

    def _joined(self, function: int, parts: Sequence[Graded]) -> Graded:
        """Completions that were scored one by one, as one."""
        keys = list(dict.fromkeys(key for part in parts for key in part.columns))
        columns = {key: [part.columns.get(key, [0.0])[0] for part in parts] for key in keys}
        events = sum((part.events for part in parts), Counter())
        return Graded(columns, events, [message for part in parts for message in part.messages])

    async def _call(self, function: int, sample: Sample) -> Scored | _Failure:
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._spawn()
            deadline = self._deadlines[function]
            try:
                reply = await asyncio.wait_for(worker.ask(Request(function, sample.each, sample.shared)), deadline)
            except TimeoutError:
                self._discard(worker)
                return _Failure("timeouts", f"did not return within {deadline:g} s (its deadline) and was killed")
            except (EOFError, ConnectionError):
                status = await worker.exit_status()
                self._discard(worker)
                return _Failure("crashes", f"ended its process (exit status {status})")
            except BaseException:
                self._discard(worker)  # its reply is still to come and would be taken for another's
                raise
            self._idle.append(worker)
        if isinstance(reply, Refused):
            raise self._refusal(reply, self._who(function, sample, 0))
        if isinstance(reply, Raised):
            print(reply.traceback, file=sys.stderr, flush=True)
            return _Failure("errors", f"raised {reply.message}", f"\n{reply.traceback.rstrip()}")
        assert isinstance(reply, Scored), reply
        return reply

    async def _spawn(self) -> _Worker:
        worker = await _Worker.start()
        self._all.add(worker)
        try:
            ready = await asyncio.wait_for(worker.ask(self._functions), _START_SECONDS)
        except TimeoutError:
            self._discard(worker)
            raise ValueError(
                f"the reward functions {', '.join(self.names)} did not import within {_START_SECONDS:g} s"
            ) from None
        except (EOFError, ConnectionError):
            status = await worker.exit_status()
            self._discard(worker)
            raise MegarlError(
                f"a reward worker ended (exit status {status}) while it imported {', '.join(self.names)}; "
                "the driver's log (logs/driver.log) has its last words"
            ) from None
        except BaseException:
            self._discard(worker)
            raise
        if isinstance(ready, Refused):
            self._discard(worker)
            raise self._refusal(ready, None)
        assert isinstance(ready, Ready), ready
        self._compares = ready.compares
        settings = zip(self._config.functions, ready.timeouts, strict=True)
        self._deadlines = [spec.timeout_seconds or own or self._config.timeout_seconds for spec, own in settings]
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._all.discard(worker)

    @staticmethod
    def _refusal(reply: Refused, who: str | None) -> Exception:
        error = MegarlError if reply.environment else ValueError
        return error(reply.message if who is None else f"{who} {reply.message}")

    def _who(self, function: int, sample: Sample, place: int) -> str:
        text = sample.texts[place]
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
        return (
            f"reward function {self.names[function]!r}, on prompt {sample.prompt_id} of data source "
            f"{sample.data_source!r} with completion {shown!r},"
        )


class _Worker:
    """One process, its supervisor and the channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            supervisor = ["megarl.supervisor", "--owner", str(os.getpid()), "--grace", "0", "--pass-fd", descriptor]
            worker = [sys.executable, "-m", "megarl.rewards.worker", "--channel", descriptor]
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", *supervisor, "--", *worker],
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                start_new_session=True,
            )
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def ask(self, message: Any) -> Reply:
        """EOFError or ConnectionError when the worker is gone."""
        self._writer.write(encode(message))
        await self._writer.drain()
        size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Reply)

    def kill(self) -> None:
        """Close the lifeline: the supervisor kills the worker and all that it started. Returns at once."""
        self._process.stdin.close()
        self._writer.close()

    async def exit_status(self) -> int | str:
        """How the process ended: 128 + its signal, where it was killed by one."""
        try:
            return await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        except TimeoutError:
            return "unknown"
