"""Groups: a prompt, its n completions, and what they are worth."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.rewards.scoring import Scorer
from megarl.rewards.shaping import truncated
from megarl.rollout.client import Sampling
from megarl.rollout.pool import EnginePool, together
from megarl.types import Completion, Prompt, Rollout

Interaction = Callable[[Prompt, Any, Sampling], Awaitable[list[Completion]]]


class Sampler:
    """Runs the interaction and the reward functions on many prompts at once."""

    def __init__(
        self,
        pool: EnginePool,
        interaction: Interaction,
        decode: Callable[[list[np.ndarray]], list[str]],
        scorer: Scorer,
        stop_token_ids: Collection[int] = (),
    ):
        self._pool, self._interaction, self._decode, self._scorer = pool, interaction, decode, scorer
        self._stop_token_ids = stop_token_ids

    async def collect(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        seed_parts: tuple,
        on_failure: Callable[[str], None] = lambda message: None,
    ) -> list[Rollout]:
        """One rollout per prompt, in order; seeds come from `seed_parts`, the prompt's id and how often it came before.

        `on_failure` is told of each completion on which a reward function failed and the run goes on. Raises
        ValueError or MegarlError where a reward function stops the run, MegarlError when the engines fail.
        """
        seen: Counter[int] = Counter()
        samplings = []
        for prompt in prompts:
            samplings.append(sampling.with_seed(derive_seed(*seed_parts, prompt.id, seen[prompt.id])))
            seen[prompt.id] += 1
        rollouts = await together(
            self._group(prompt, one, on_failure) for prompt, one in zip(prompts, samplings, strict=True)
        )
        return _same_parts(rollouts)

    async def _group(self, prompt: Prompt, sampling: Sampling, on_failure: Callable[[str], None]) -> Rollout:
        completions = await self._interaction(prompt, self._pool, sampling)
        if self._stop_token_ids:
            completions = [truncated(completion, self._stop_token_ids) for completion in completions]
        texts = self._decode([completion.token_ids for completion in completions])
        scores = await self._scorer.score(prompt, completions, texts)
        for message in scores.messages:
            on_failure(message)
        return Rollout(prompt, completions, scores.total, scores.parts, texts, scores.events)


async def refilled(
    collect: Callable[[int, int], Awaitable[list[Rollout]]], num_prompts: int, rounds: int
) -> list[Rollout]:
    """`num_prompts` rollouts; those whose completions all score the same are replaced by other prompts' (DAPO's dynamic
    sampling, arXiv 2503.14476, section 3.2), in at most `rounds` further calls: what is then still idle stays.

    collect: (prompts to take, number of the call from 0) -> a rollout of each.
    """
    rollouts = await collect(num_prompts, 0)
    for number in range(1, rounds + 1):
        idle = [place for place, rollout in enumerate(rollouts) if np.ptp(rollout.scores) == 0]
        if not idle:
            break
        for place, fresh in zip(idle, await collect(len(idle), number), strict=True):
            rollouts[place] = fresh
    return _same_parts(rollouts)


def _same_parts(rollouts: list[Rollout]) -> list[Rollout]:
    """All rollouts with the same reward parts: a function's further keys are unknown, so 0, where it failed on all."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    return [
        replace(rollout, rewards={name: rollout.rewards.get(name, np.zeros(len(rollout.texts))) for name in names})
        for rollout in rollouts
    ]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^62) from all parts; far apart for neighbours, since n completions use n seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
