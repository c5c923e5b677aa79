"""The rollout driver: one asyncio process between rank 0 and the engines (`python -m megarl.rollout.driver`).

It owns prompt order, engines, interactions and rewards; it knows no Megatron and no process group. Rank 0
(rollout/handle.py) speaks to it over an inherited socket in the frames of rollout/frames.py; requests run side by side
and each gets one last reply. When rank 0 is gone, however it went, the socket ends: the driver ends too, engines first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megarl.config.root import TrainConfig
from megarl.data.prompts import PromptOrder, PromptSet, load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import MegarlError
from megarl.rewards.scoring import Scorer
from megarl.rewards.workers import RewardWorkers
from megarl.rollout import replay
from megarl.rollout.client import Sampling
from megarl.rollout.engine import Engine, Placement, SocketFolder
from megarl.rollout.frames import Reply, Request, decode, encode, frame, receive_async
from megarl.rollout.interactions import single_turn
from megarl.rollout.pool import EnginePool, together
from megarl.rollout.sampler import Sampler, derive_seed, refilled
from megarl.types import Completion, Prompt, Rollout

_CLOSE_SECONDS = 20.0

Notify = Callable[[str, Any], None]  # a reply that is not the last: ("progress", line) or ("started", None)


class Driver:
    """What rank 0 can ask for: each public method is one request, its arguments the request's parameters."""

    def __init__(self) -> None:
        self._pool: EnginePool | None = None
        self._rewards: RewardWorkers | None = None

    async def start(
        self, notify: Notify, config: dict[str, Any], run_dir: str, gpu_ids: list[str] | None
    ) -> dict[str, int]:
        """Start engines; load tokenizer, data and rewards meanwhile. Returns {"train": rows, "val": rows}."""
        # The algorithm's own keys are rank 0's business: a subclass of its section, which is not loaded here.
        config["algorithm"] = {"name": config["algorithm"]["name"]}
        self._config = TrainConfig.model_validate(config)
        sockets = SocketFolder(self._config.rollout.socket_dir)
        places = Placement(gpu_ids)
        engines = [
            Engine(index, self._config, Path(run_dir), sockets, places)
            for index in range(self._config.rollout.num_engines)
        ]
        self._pool = EnginePool(engines, self._config.rollout)
        progress = lambda line: notify("progress", line)  # noqa: E731
        self._rewards = RewardWorkers(self._config.reward)
        work = [self._pool.start(progress), self._rewards.start(), asyncio.to_thread(self._load, progress)]
        await together(work)
        return {"train": len(self._train), "val": len(self._val)}

    async def collect(
        self, notify: Notify, num_prompts: int, step: int, greedy_baseline: bool = False
    ) -> list[Rollout]:
        on_failure = _first_of_each(lambda line: notify("progress", line))

        async def groups(count: int, call: int) -> list[Rollout]:
            prompts, seed_parts = self._order.take(count), (self._seed, "train", step, *([call] if call else []))
            samplings = [self._sampling(self._config.rollout.n), *([self._sampling(1, 0.0)] if greedy_baseline else [])]
            rollouts, *baselines = await together(
                self._sampler.collect(prompts, sampling, seed_parts, on_failure) for sampling in samplings
            )
            for greedy in baselines:
                pairs = zip(rollouts, greedy, strict=True)
                rollouts = [replace(rollout, baseline=baseline) for rollout, baseline in pairs]
            return rollouts

        rollouts = await refilled(groups, num_prompts, self._config.rollout.dynamic_sampling_rounds)
        if self._config.rollout.record_dir is not None:
            await asyncio.to_thread(replay.record, Path(self._config.rollout.record_dir), step, rollouts)
        return rollouts

    async def validate(self, notify: Notify, step: int) -> dict[str, list[Rollout]]:
        """Held-out prompts, sampled and greedy. Every step uses the same seeds: only the policy differs."""
        settings = self._config.rollout.val_kwargs
        if not self._val:
            return {}
        samplings = {
            "sampled": self._sampling(settings.n, settings.temperature),
            "greedy": self._sampling(1, 0.0),
        }
        on_failure = _first_of_each(lambda line: notify("progress", line))
        results = await together(
            self._sampler.collect(self._val, sampling, (self._seed, "val"), on_failure)
            for sampling in samplings.values()
        )
        return dict(zip(samplings, results, strict=True))

    async def generate(
        self, notify: Notify, prompts: list[np.ndarray], n: int, temperature: float, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        return await together(
            self._engines.complete(ids, Sampling(n, temperature, max_tokens, derive_seed(seed, "generate", place)))
            for place, ids in enumerate(prompts)
        )

    async def score(self, notify: Notify, sequences: list[np.ndarray]) -> list[list[np.ndarray]]:
        """From every engine the log-probs of the sequences' own tokens."""
        return await together(
            together(engine.client.score(ids) for ids in sequences) for engine in self._engines.engines
        )

    async def init_weight_transfer(self, notify: Notify, init_infos: list[dict[str, Any]]) -> None:
        by_name = dict(zip((engine.name for engine in self._engines.engines), init_infos, strict=True))
        await self._engines.each(lambda engine: engine.client.init_weight_transfer(by_name[engine.name]))

    async def sync(self, notify: Notify, version: int, digests: list[str], audited: bool) -> None:
        """Every engine installs what the trainer sends; "started" goes out once all are about to receive."""
        plans = dict(zip((engine.name for engine in self._engines.engines), digests, strict=True))
        started = {engine.name: asyncio.Event() for engine in self._engines.engines}

        async def announce() -> None:
            await together(event.wait() for event in started.values())
            notify("started", None)

        def update_one(engine: Engine):
            update_info = {"version": version, "digest": plans[engine.name], "audited": audited}
            return engine.client.update_weights(update_info, started[engine.name])

        update = self._engines.each(update_one)
        await together([announce(), update])

    async def sleep(self, notify: Notify) -> None:
        await self._engines.each(lambda engine: engine.client.sleep())

    async def wake_up(self, notify: Notify) -> None:
        await self._engines.each(lambda engine: engine.client.wake_up())

    async def close(self) -> None:
        if self._rewards is not None:
            await self._rewards.close()
        if self._pool is not None:
            await self._pool.close()

    @property
    def _engines(self) -> EnginePool:
        assert self._pool is not None, "start comes first"
        return self._pool

    @property
    def _seed(self) -> int:
        return self._config.trainer.seed

    def _sampling(self, n: int, temperature: float | None = None) -> Sampling:
        heat = self._config.rollout.temperature if temperature is None else temperature
        return Sampling(n=n, temperature=heat, max_tokens=self._config.data.max_response_length, seed=0)

    def _load(self, progress: Callable[[str], None]) -> None:
        """Tokenizer and prompts; runs in a thread while engines and reward workers start."""
        config = self._config
        tokenizer = load_tokenizer(config.actor.model.path)
        self._train = load_prompts(config.data.train_files, config.data, tokenizer)
        held_out = (
            load_prompts(config.data.val_files, config.data, tokenizer) if config.data.val_files else PromptSet([], [])
        )
        self._val: list[Prompt] = list(held_out)[: config.rollout.val_kwargs.max_prompts]
        for line in self._train.report + held_out.report:
            progress(line)
        self._order = PromptOrder(self._train, config.trainer.seed, config.data.shuffle)

        def texts(ids: list[np.ndarray]) -> list[str]:
            return tokenizer.batch_decode([one.tolist() for one in ids], skip_special_tokens=True)

        stops = {config.reward.stop_token_id, tokenizer.eos_token_id if config.reward.stop_token == "eos" else None}
        scorer = Scorer(config.reward, self._rewards, config.data.max_response_length)
        self._sampler = Sampler(self._engines, single_turn.run, texts, scorer, stops - {None})


def _first_of_each(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tells the first failure of every reward function, and writes all to the log."""
    told = set()

    def on_failure(message: str) -> None:
        print(message, file=sys.stderr)
        function = message.partition(",")[0]
        if function not in told:
            told.add(function)
            tell(message)

    return on_failure


async def serve(channel: socket.socket) -> None:
    """Answer rank 0 until its end of the channel closes, then end the engines."""
    reader, writer = await asyncio.open_connection(sock=channel)
    driver, tasks = Driver(), set()

    def send(request_id: int, kind: str, value: Any) -> None:
        writer.write(frame(encode(Reply(request_id, kind, msgspec.Raw(encode(value))))))

    async def answer(request: Request) -> None:
        try:
            method = getattr(driver, request.method)
            result = await method(lambda kind, value: send(request.id, kind, value), **decode(request.params))
            send(request.id, "result", result)
        except Exception as error:  # every failure is rank 0's to report; the traceback is for the log
            traceback.print_exc()
            send(request.id, *_as_reply(error))
        await writer.drain()

    try:
        while True:
            request = decode(await receive_async(reader), Request)
            task = asyncio.create_task(answer(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (EOFError, ConnectionError):
        pass
    finally:
        for task in tasks:
            task.cancel()
        await driver.close()


def _as_reply(error: Exception) -> tuple[str, str]:
    if isinstance(error, MegarlError):
        return "MegarlError", str(error)
    if isinstance(error, ValueError):
        return "ValueError", str(error)
    return "MegarlError", f"the rollout driver failed: {type(error).__name__}: {error}"


def _end_with_rank_zero(channel: socket.socket, owner: int) -> None:
    """End this process when rank 0 is gone, even if the event loop hangs; the supervisors then end the engines."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    while not poll.poll(1000) and os.getppid() == owner:
        pass
    time.sleep(_CLOSE_SECONDS)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="megarl.rollout.driver")
    parser.add_argument("--channel", type=int, required=True, help="inherited file descriptor of the socket to rank 0")
    parser.add_argument("--owner", type=int, required=True, help="process id of rank 0, this program's parent")
    arguments = parser.parse_args()
    channel = socket.socket(fileno=arguments.channel)
    threading.Thread(target=_end_with_rank_zero, args=(channel, arguments.owner), daemon=True).start()
    asyncio.run(serve(channel))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a reward function that never returns holds its thread, and must not hold the exit


if __name__ == "__main__":
    main()
