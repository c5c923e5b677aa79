"""What a prompt's completions are worth: the weighted sum of the reward functions, and the penalties."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.rewards import shaping
from megarl.rewards.workers import EVENTS, RewardWorkers, Sample
from megarl.types import Completion, Prompt

if TYPE_CHECKING:
    from megarl.config.rollout import RewardConfig


@dataclass(frozen=True)
class Scores:
    """The scores of one prompt's completions."""

    total: np.ndarray  # [n] float64, weighted sum over the functions, minus the penalties
    parts: dict[str, np.ndarray]  # "<function>", "<function>/<further key>" and each penalty, [n] float64
    events: dict[str, int]  # "<function>/timeouts" and the other EVENTS: completions on which the function failed
    messages: list[str]  # what each of these was


class Scorer:
    """Scores completions as `reward.*` says."""

    def __init__(self, config: RewardConfig, workers: RewardWorkers, max_response_length: int):
        self._config, self._workers, self._limit = config, workers, max_response_length

    async def score(self, prompt: Prompt, completions: list[Completion], texts: list[str]) -> Scores:
        """Raises what RewardWorkers.score raises."""
        count = len(texts)
        sample = Sample(
            prompt_id=prompt.id,
            data_source=prompt.data_source,
            each={
                "completions": texts,
                "prompts": [prompt.messages] * count,
                "finish_reason": [completion.finish_reason for completion in completions],
                "completion_ids": [completion.token_ids.tolist() for completion in completions],
            },
            shared={"data_source": prompt.data_source, **prompt.columns, "ground_truth": prompt.ground_truth},
        )
        functions = self._config.functions
        graded = await asyncio.gather(*(self._workers.score(place, sample) for place in range(len(functions))))
        total, parts, events, messages = np.zeros(count), {}, Counter(), []
        for name, spec, one in zip(self._workers.names, functions, graded, strict=True):
            parts |= {name if key == "score" else f"{name}/{key}": np.array(one.columns[key]) for key in one.columns}
            events.update({f"{name}/{event}": one.events[event] for event in EVENTS})
            messages += one.messages
            total += spec.weight * parts[name]
        penalties = self._penalties(completions)
        return Scores(total + sum(penalties.values()), parts | penalties, dict(events), messages)

    def _penalties(self, completions: list[Completion]) -> dict[str, np.ndarray]:
        """The configured penalties by their names, [n] float64 each, negative where one is due."""
        found, overlong = {}, self._config.overlong_buffer
        if self._config.missing_eos_penalty:
            reasons = [completion.finish_reason for completion in completions]
            found["missing_eos_penalty"] = shaping.missing_eos(reasons, self._config.missing_eos_penalty)
        if overlong.len:
            lengths = [len(completion.token_ids) for completion in completions]
            found["overlong_penalty"] = shaping.soft_overlong(
                lengths, self._limit, overlong.len, overlong.penalty_factor
            )
        return found
