"""`megarl judge`: how often a judge prefers the model's answers to reference answers, or to another model's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.config.root import TrainConfig
from megarl.evaluation import bootstrap
from megarl.rewards.judge import Endpoint, Judge, text_of_prompt
from megarl.rewards.worker import Function, Scored, answer, load
from megarl.rollout.handle import RolloutDriver
from megarl.types import Rollout


@dataclass(frozen=True)
class WinRate:
    """Of one comparison a prompt; a tie is half a win."""

    rate: float
    low: float  # ends of the 95 % bootstrap interval over prompts
    high: float
    ties: int
    inconsistent: int  # the judge named the place, not the answer: counted as ties
    unclear: int  # a reply of the judge named neither answer nor a tie: counted as a tie
    prompts: int


@dataclass(frozen=True)
class Rule:
    """A reward function that judges offline; `load_rule` makes one."""

    spec: Function
    function: Callable[..., list]


def load_rule(name: str) -> Rule:
    """Of a reward function's name, or path/to/file.py:function. Raises ValueError where there is none such."""
    spec = Function(name, {}, conversational=False)
    return Rule(spec, load(spec))


def answers_of(config: TrainConfig, run_dir: Path, on_progress: Callable[[str], None], examples: int) -> list[Rollout]:
    """The model's greedy answers to the first `examples` held-out prompts.

    Raises:
        ValueError: no held-out files.
    """
    if not config.data.val_files:
        raise ValueError("there is nothing to judge: set data.val_files")
    kwargs = config.rollout.val_kwargs.model_copy(update={"max_prompts": examples, "n": 1})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"val_kwargs": kwargs})})
    with RolloutDriver.start(config, run_dir) as driver:
        driver.wait_until_ready(on_progress)
        return driver.validate(0)["greedy"]


def references(rollouts: list[Rollout], column: str) -> list[str]:
    """The reference answer of each prompt: its ground truth, or another column of the dataset.

    Raises:
        ValueError: the column is missing.
    """
    if column == "ground_truth":
        return [str(rollout.prompt.ground_truth) for rollout in rollouts]
    missing = [rollout.prompt.id for rollout in rollouts if column not in rollout.prompt.columns]
    if missing:
        known = ", ".join(["ground_truth", *sorted(rollouts[0].prompt.columns)])
        raise ValueError(f"row {missing[0]} of the held-out data has no column {column!r}; it has: {known}")
    return [str(rollout.prompt.columns[column]) for rollout in rollouts]


def by_rule(rollouts: list[Rollout], others: list[str], rule: Rule) -> WinRate:
    """An offline judge: the answer with the higher score of a reward function wins.

    Raises:
        ValueError: the function needs what the dataset does not have, raises, or returns something else than a finite
            number for each answer.
    """
    wins = []
    for rollout, other in zip(rollouts, others, strict=True):
        prompt = rollout.prompt
        each = {
            "completions": [rollout.texts[0], other],
            "prompts": [prompt.messages] * 2,
            "finish_reason": [rollout.completions[0].finish_reason, "stop"],
        }
        shared = {"data_source": prompt.data_source, **prompt.columns, "ground_truth": prompt.ground_truth}
        reply = answer(rule.function, rule.spec, each, shared)
        if not isinstance(reply, Scored):
            raise ValueError(f"the rule {rule.spec.name!r}, on prompt {prompt.id}, {reply.message}")
        if reply.invalid:
            raise ValueError(
                f"the rule {rule.spec.name!r}, on prompt {prompt.id}, returned {next(iter(reply.invalid.values()))}"
            )
        mine, theirs = reply.columns["score"]
        wins.append(0.5 + 0.5 * ((mine > theirs) - (mine < theirs)))
    return _win_rate(np.array(wins))


def by_model(rollouts: list[Rollout], others: list[str], endpoint: Endpoint, template: str | None = None) -> WinRate:
    """A judge model, asked twice with the answers in either place.

    Raises:
        MegarlError: the endpoint cannot be reached.
    """

    async def ask():
        async with Judge(endpoint) as judge:
            return await asyncio.gather(
                *(
                    judge.compare(text_of_prompt(r.prompt.messages), r.texts[0], other, template)
                    for r, other in zip(rollouts, others, strict=True)
                )
            )

    verdicts = asyncio.run(ask())
    unclear = sum(not verdict.understood for verdict in verdicts)
    inconsistent = sum(verdict.understood and not verdict.consistent for verdict in verdicts)
    return _win_rate(np.array([verdict.first_wins for verdict in verdicts]), inconsistent, unclear)


def _win_rate(wins: np.ndarray, inconsistent: int = 0, unclear: int = 0) -> WinRate:
    rate, low, high = bootstrap(wins)
    return WinRate(rate, low, high, int((wins == 0.5).sum()), inconsistent, unclear, len(wins))
