"""Several engines as one: requests go to the least busy, a failed one is tried elsewhere, all sync together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np

from megarl.config.rollout import RolloutConfig
from megarl.errors import MegarlError
from megarl.rollout.client import EngineUnavailable, Sampling
from megarl.rollout.engine import Engine
from megarl.types import Completion

_QUEUE_DEPTH = 2  # requests wait here, not in an engine, once it has this many times what it can work on at once
_DEATH_SECONDS = 3.0


class EnginePool:
    """Looks like one client to an interaction: `await pool.complete(prompt, sampling)`."""

    def __init__(self, engines: list[Engine], config: RolloutConfig):
        self.engines = engines
        self._max_retries = config.max_retries
        self._limit = _QUEUE_DEPTH * config.max_num_seqs
        self._freed = asyncio.Condition()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Start all engines at once and wait for all."""
        await together(self._start(engine, on_progress) for engine in self.engines)

    async def complete(self, prompt: np.ndarray, sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions of `prompt` ([P] int32) from some engine.

        Raises MegarlError after `rollout.max_retries` further tries, naming the engines that failed, dead ones with the
        last lines of their logs.
        """
        failures: list[str] = []
        tried: set[str] = set()
        for _ in range(self._max_retries + 1):
            engine = await self._acquire(sampling.n, tried)
            if engine is None:
                failures += [str(dead.failure("died")) for dead in self.engines if dead.name not in tried]
                break
            try:
                return await engine.client.complete(prompt, sampling)
            except EngineUnavailable as error:
                tried.add(engine.name)
                failures.append(await self._explain(engine, error))
            finally:
                async with self._freed:
                    self._freed.notify_all()
        raise MegarlError("\n".join(dict.fromkeys(failures)))

    async def each(self, action: Callable[[Engine], Awaitable[Any]]) -> None:
        """Do `action` on every engine at once. A dead engine is reported as such, with its log."""

        async def one(engine: Engine) -> None:
            try:
                await action(engine)
            except MegarlError as error:
                raise MegarlError(await self._explain(engine, error)) from None

        await together(one(engine) for engine in self.engines)

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _start(self, engine: Engine, on_progress: Callable[[str], None]) -> None:
        await engine.start()
        await engine.wait_until_ready(on_progress)

    async def _acquire(self, completions: int, tried: set[str]) -> Engine | None:
        """The least busy living engine, if possible one not tried yet; waits while all are full; None: all are dead."""
        async with self._freed:
            while True:
                living = [engine for engine in self.engines if engine.is_alive]
                candidates = [engine for engine in living if engine.name not in tried] or living
                if not candidates:
                    return None
                engine = min(candidates, key=lambda engine: engine.client.pending_completions)
                load = engine.client.pending_completions
                if load == 0 or load + completions <= self._limit:
                    return engine
                await self._freed.wait()

    async def _explain(self, engine: Engine, error: MegarlError) -> str:
        if await engine.died_within(_DEATH_SECONDS):
            return str(engine.failure("died"))
        return f"{error}; its log is {engine.log}"


async def together(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order; on the first failure cancel the rest, wait for their end, and raise that failure."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
