"""Routing and retries over the shared real engine and sockets that misbehave."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from megarl.config.rollout import RolloutConfig
from megarl.errors import MegarlError
from megarl.rollout.client import EngineClient, Sampling
from megarl.rollout.pool import EnginePool, together

PROMPT = np.array([3, 20, 31], np.int32)
SAMPLING = Sampling(n=2, temperature=1.0, max_tokens=4, seed=9)


class Place:
    """An engine that somebody else started: what the pool wants to know of one."""

    def __init__(self, name: str, path: Path):
        self.name, self.log, self.is_alive = name, path.with_suffix(".log"), True
        self.client = EngineClient(name, os.fspath(path), timeout_seconds=30)

    async def died_within(self, seconds: float) -> bool:
        return not self.is_alive

    def failure(self, what: str) -> MegarlError:
        return MegarlError(f"{self.name} {what}: its last words")


@asynccontextmanager
async def pool_of(*paths: Path, **settings):
    places = [Place(f"engine {index}", path) for index, path in enumerate(paths)]
    try:
        yield EnginePool(places, RolloutConfig(**settings))
    finally:
        for place in places:
            await place.client.close()


async def serve_500(path: Path, counts: list[int]):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        counts.append(1)
        body = b'{"error":{"message":"EngineCore encountered an issue"}}'
        writer.write(b"HTTP/1.1 500 Bad\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(handle, path)


def test_another_engine_answers_with_the_same_completions(driver, engine_socket_dir, tmp_path):
    async def main():
        counts: list[int] = []
        real = engine_socket_dir / "engine_0.sock"
        async with await serve_500(tmp_path / "bad.sock", counts), pool_of(tmp_path / "bad.sock", real) as pool:
            retried = await pool.complete(PROMPT, SAMPLING)
            direct = await pool.engines[1].client.complete(PROMPT, SAMPLING)
        assert len(counts) == 1
        assert [one.token_ids.tolist() for one in retried] == [one.token_ids.tolist() for one in direct]

    asyncio.run(main())


def test_retries_are_bounded_and_every_failure_is_named(tmp_path):
    async def main():
        counts: list[int] = []
        bad, gone = tmp_path / "bad.sock", tmp_path / "gone.sock"
        async with await serve_500(bad, counts), pool_of(bad, gone, max_retries=3) as pool:
            pool.engines[1].is_alive = True
            with pytest.raises(MegarlError) as caught:
                await pool.complete(PROMPT, SAMPLING)
        assert len(counts) >= 1
        assert "engine 0 refused /v1/completions (HTTP 500): EngineCore encountered an issue; its log is" in str(
            caught.value
        )
        assert "engine 1 broke off /v1/completions" in str(caught.value)

    asyncio.run(main())


def test_dead_engines_get_no_work_and_their_logs_are_quoted(driver, engine_socket_dir, tmp_path):
    async def main():
        async with pool_of(tmp_path / "gone.sock", engine_socket_dir / "engine_0.sock") as pool:
            pool.engines[0].is_alive = False
            assert len(await pool.complete(PROMPT, SAMPLING)) == 2
            with pytest.raises(MegarlError, match="engine 0 died: its last words"):
                await pool.each(lambda engine: engine.client.complete(PROMPT, SAMPLING))
            pool.engines[1].is_alive = False
            with pytest.raises(MegarlError, match="engine 0 died: its last words\nengine 1 died: its last words"):
                await pool.complete(PROMPT, SAMPLING)

    asyncio.run(main())


def test_work_goes_to_the_least_busy_and_waits_when_all_are_full(driver, engine_socket_dir):
    async def main():
        real = engine_socket_dir / "engine_0.sock"
        async with pool_of(real, real, max_num_seqs=2) as pool:  # at most 4 completions in each
            most = [0, 0]

            async def watch():
                while True:
                    for index, engine in enumerate(pool.engines):
                        most[index] = max(most[index], engine.client.pending_completions)
                    await asyncio.sleep(0)

            watcher = asyncio.create_task(watch())
            groups = await asyncio.gather(*(pool.complete(PROMPT, SAMPLING.with_seed(seed)) for seed in range(20)))
            watcher.cancel()
            assert [len(group) for group in groups] == [2] * 20
            assert most == [4, 4]
            assert [engine.client.pending_completions for engine in pool.engines] == [0, 0]
            # More than fits at once still goes through, alone.
            assert len(await pool.complete(PROMPT, Sampling(n=9, temperature=1.0, max_tokens=2, seed=0))) == 9

    asyncio.run(main())


def test_together_cancels_the_rest_and_raises_the_first_failure():
    async def main():
        ended = []

        async def slow():
            try:
                await asyncio.sleep(30)
            finally:
                ended.append("slow")

        async def fails():
            await asyncio.sleep(0)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await together([slow(), fails(), slow()])
        assert ended == ["slow", "slow"]
        assert await together([asyncio.sleep(0.02, "a"), asyncio.sleep(0, "b")]) == ["a", "b"]

    asyncio.run(main())
