"""One engine over its Unix socket: token ids in, token ids and sampling log-probs out, and the control routes.

Request and reply follow vLLM 0.32 (`vllm/entrypoints/openai/completion/protocol.py` and
`vllm/entrypoints/rl/online/api_router.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import numpy as np

from megarl.errors import MegarlError
from megarl.types import Completion

MODEL_NAME = "policy"


@dataclass(frozen=True)
class Sampling:
    """How to sample one prompt. Equal fields and equal weights give equal completions, whichever engine answers."""

    n: int
    temperature: float  # 0 is greedy
    max_tokens: int
    seed: int  # completion j is drawn with seed + j

    def with_seed(self, seed: int) -> Sampling:
        return replace(self, seed=seed)


class EngineUnavailable(MegarlError):
    """The engine gave no usable answer (connection lost, time out, 5xx): another engine, or a later try, may."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class _Token(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None]  # None for the first token


class _Scores(msgspec.Struct):
    choices: list[_Scored]


class EngineClient:
    """Talks to one engine; knows how many completions it owes and which weights it holds.

    `weight_version` is exact for every completion: `update_weights` lets no request in and waits for those under way.
    """

    def __init__(self, name: str, socket: str, timeout_seconds: float):
        self.name = name
        self.weight_version = 0
        self.pending_completions = 0
        self._requests = 0
        self._changed = asyncio.Condition()
        self._updating = False
        self._broken_update: int | None = None  # version of an update that began and did not end
        self._session = aiohttp.ClientSession(
            base_url="http://engine",
            connector=aiohttp.UnixConnector(path=socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._timeout = timeout_seconds

    async def complete(self, prompt: np.ndarray, sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions of the token ids `prompt` ([P] int32).

        Raises EngineUnavailable when another try may help, MegarlError with the server's words when the engine refuses.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": prompt.tolist(),
            "n": sampling.n,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
            "logprobs": 0,
            "return_token_ids": True,
            # Stated, because vLLM fills what is left out from the checkpoint's generation_config.json.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        await self._enter(sampling.n)
        try:
            answer = await self._post("/v1/completions", body, timeout=self._timeout)
            version = self.weight_version
        finally:
            await self._leave(sampling.n)
        choices = msgspec.json.decode(answer, type=_Completions).choices
        return [_completion(self.name, choice, version) for choice in choices]

    async def healthy(self) -> bool:
        """Whether the server answers and its engine core lives."""
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Give the workers what they need to join the trainer's transfer group; returns once they have."""
        await self._post("/init_weight_transfer_engine", {"init_info": init_info})

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """[T - 1] float32: log p(token i | the tokens before it) for i = 1.., at temperature 1."""
        body = {
            "model": MODEL_NAME,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        await self._enter(1)
        try:
            answer = await self._post("/v1/completions", body, timeout=self._timeout)
        finally:
            await self._leave(1)
        (choice,) = msgspec.json.decode(answer, type=_Scores).choices
        own = [places[str(token)].logprob for places, token in zip(choice.prompt_logprobs[1:], token_ids[1:].tolist())]
        return np.array(own, np.float32)

    async def update_weights(self, update_info: dict[str, Any], started: asyncio.Event) -> None:
        """Install the weights that the trainer sends meanwhile; completions asked for from now on come from them.

        Waits for the requests under way; `started` is set when the engine's workers are about to receive. When it
        fails, the engine stays paused and `complete` refuses: what it holds then is no version. Another update may
        follow.

        Args:
            update_info: {"version", "digest" of the plan, "audited"}, for the workers.
        """
        version = update_info["version"]
        self._updating = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._requests == 0)
            await self._post("/pause", params={"mode": "wait"})
            self._broken_update = version
            await self._post("/start_weight_update")
            started.set()
            await self._post("/update_weights", {"update_info": update_info})
            await self._post("/finish_weight_update", {"weight_version": str(version)})
            await self._reset_prefix_cache()
            await self._post("/resume")
            self.weight_version, self._broken_update = version, None
        finally:
            self._updating = False
            async with self._changed:
                self._changed.notify_all()

    async def sleep(self) -> None:
        """Release the memory of weights (kept in host memory) and key-value cache."""
        await self._post("/sleep", params={"level": "1", "mode": "wait"})

    async def wake_up(self) -> None:
        await self._post("/wake_up")

    async def close(self) -> None:
        await self._session.close()

    async def _reset_prefix_cache(self) -> None:
        """Keys and values of the old weights must not answer for the new ones."""
        answer = msgspec.json.decode(await self._post("/reset_prefix_cache"))
        if not answer["success"]:
            raise MegarlError(
                f"{self.name} could not reset its prefix cache after a weight update: blocks are still held"
            )

    async def _enter(self, completions: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            if self._broken_update is not None:
                raise MegarlError(
                    f"{self.name} does not generate: its update to weight version {self._broken_update} broke off"
                )
            self._requests += 1
            self.pending_completions += completions

    async def _leave(self, completions: int) -> None:
        async with self._changed:
            self._requests -= 1
            self.pending_completions -= completions
            self._changed.notify_all()

    async def _post(
        self, path: str, body: Any = None, params: dict[str, str] | None = None, timeout: float | None = None
    ):
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                path, data=data, params=params, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                answer = await response.read()
        except TimeoutError:
            raise EngineUnavailable(f"{self.name} did not answer {path} within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self.name} broke off {path}: {type(error).__name__}: {error}") from None
        if response.status == 200:
            return answer
        message = f"{self.name} refused {path} (HTTP {response.status}): {_server_message(answer)}"
        raise EngineUnavailable(message) if response.status >= 500 else MegarlError(message)


def _completion(engine: str, choice: _Choice, version: int) -> Completion:
    if choice.finish_reason not in ("stop", "length"):
        raise EngineUnavailable(f"{engine} ended a completion early (finish_reason {choice.finish_reason!r})")
    length = len(choice.token_ids)
    return Completion(
        token_ids=np.array(choice.token_ids, np.int32),
        logprobs=np.array(choice.logprobs.token_logprobs, np.float32),
        finish_reason=choice.finish_reason,
        loss_mask=np.ones(length, np.uint8),
        weight_version=np.full(length, version, np.int32),
    )


def _server_message(answer: bytes) -> str:
    """vLLM's own words out of its several error layouts, or the body as it is."""
    try:
        body = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer.decode(errors="replace")[:2000]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
