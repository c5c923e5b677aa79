"""Groups: a prompt, its n completions, and what they are worth."""

from __future__ import annotations

import asyncio
import hashlib
import math
import numbers
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.rollout.client import Sampling
from megarl.rollout.pool import EnginePool, together
from megarl.types import Completion, Prompt, Rollout

RewardCallable = Callable[..., Sequence[float | dict[str, float]]]
Interaction = Callable[[Prompt, Any, Sampling], Awaitable[list[Completion]]]
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class WeightedReward:
    name: str
    weight: float
    function: RewardCallable


class Sampler:
    """Runs the interaction and the reward functions on many prompts at once."""

    def __init__(
        self,
        pool: EnginePool,
        interaction: Interaction,
        decode: Callable[[list[np.ndarray]], list[str]],
        rewards: list[WeightedReward],
    ):
        self._pool, self._interaction, self._decode, self._rewards = pool, interaction, decode, rewards

    async def collect(self, prompts: list[Prompt], sampling: Sampling, seed_parts: tuple) -> list[Rollout]:
        """One rollout per prompt, in order; seeds come from `seed_parts`, the prompt's id and how often it came before.

        Raises ValueError when a reward function fails, MegarlError when the engines do.
        """
        seen: Counter[int] = Counter()
        samplings = []
        for prompt in prompts:
            samplings.append(sampling.with_seed(derive_seed(*seed_parts, prompt.id, seen[prompt.id])))
            seen[prompt.id] += 1
        return await together(map(self._group, prompts, samplings))

    async def _group(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        completions = await self._interaction(prompt, self._pool, sampling)
        texts = self._decode([completion.token_ids for completion in completions])
        reasons = [completion.finish_reason for completion in completions]
        # In a thread: a slow function holds up neither the requests of other groups nor the channel to rank 0.
        scores, rewards = await asyncio.to_thread(score_group, prompt, texts, reasons, self._rewards)
        return Rollout(prompt=prompt, completions=completions, scores=scores, rewards=rewards, texts=texts)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^62) from all parts; far apart for neighbours, since n completions use n seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def score_group(
    prompt: Prompt, texts: list[str], finish_reasons: list[str], rewards: list[WeightedReward]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Scores [n] float64 (the weighted sum) and the parts: each function's score and its extra keys, [n] float64.

    Raises ValueError naming the function and the sample when a function raises, returns another number of values than
    completions, or returns something that is not a finite number.
    """
    total, parts = np.zeros(len(texts)), {}
    for reward in rewards:
        values = _call(reward, prompt, texts, finish_reasons)
        columns = _columns(reward, prompt, texts, values)
        parts |= columns
        total += reward.weight * columns[reward.name]
    return total, parts


def _call(reward: WeightedReward, prompt: Prompt, texts: list[str], finish_reasons: list[str]) -> list[Any]:
    constants = {"data_source": prompt.data_source, **prompt.columns, "ground_truth": prompt.ground_truth}

    def call(some: list[str], reasons: list[str]) -> list[Any]:
        columns = {key: [value] * len(some) for key, value in constants.items()}
        prompts = [prompt.messages] * len(some)
        return list(reward.function(completions=some, prompts=prompts, finish_reason=reasons, **columns))

    try:
        values = call(texts, finish_reasons)
    except Exception as error:  # a user's function may raise anything; the user is told which sample did it
        alone = zip(texts, finish_reasons, strict=True)
        guilty = next((text for text, reason in alone if _raises(call, [text], [reason])), texts[0])
        raise ValueError(f"{_who(reward, prompt, guilty)} raised {type(error).__name__}: {error}") from error
    if len(values) != len(texts):
        raise ValueError(
            f"{_who(reward, prompt, texts[0])} returned {len(values)} values for {len(texts)} completions; "
            "it must return one number (or one dict with a 'score') per completion"
        )
    return values


def _raises(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except Exception:  # whatever it is, this sample is the one
        return True
    return False


def _columns(reward: WeightedReward, prompt: Prompt, texts: list[str], values: list[Any]) -> dict[str, np.ndarray]:
    as_dicts = [value if isinstance(value, dict) else {"score": value} for value in values]
    for text, value in zip(texts, as_dicts, strict=True):
        if "score" not in value or value.keys() != as_dicts[0].keys():
            raise ValueError(
                f"{_who(reward, prompt, text)} returned a dict with the keys {sorted(value)}; every dict must have the "
                f"same keys, 'score' among them (the first completion's has {sorted(as_dicts[0])})"
            )
        for key, number in value.items():
            if not isinstance(number, numbers.Real) or not math.isfinite(number):
                raise ValueError(
                    f"{_who(reward, prompt, text)} returned {key}={number!r}, which is not a finite number"
                )
    names = {key: reward.name if key == "score" else f"{reward.name}/{key}" for key in as_dicts[0]}
    return {name: np.array([float(value[key]) for value in as_dicts]) for key, name in names.items()}


def _who(reward: WeightedReward, prompt: Prompt, text: str) -> str:
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return (
        f"reward function {reward.name!r}, on prompt {prompt.id} of data source {prompt.data_source!r} "
        f"with completion {shown!r},"
    )
