"""Groups: seeds, truncation, and what reward functions said; with a worker but without an engine."""

import asyncio

import numpy as np

from megarl.config.rollout import RewardConfig
from megarl.rewards.scoring import Scorer
from megarl.rewards.workers import RewardWorkers
from megarl.rollout.client import Sampling
from megarl.rollout.sampler import Sampler, derive_seed, refilled
from megarl.types import Completion, Prompt, Rollout

WORDS = ["", "a", "b", "fail", "."]


async def interaction(prompt, client, sampling):
    """Completion j is the prompt's id, a stop token (4), and a 1 that is to be cut."""
    ids = np.array([prompt.id, 4, 1], np.int32)
    whole = Completion(ids, np.zeros(3, np.float32), "length", np.ones(3, np.uint8), np.zeros(3, np.int32))
    return [whole] * sampling.n


def collect(tmp_path, ids):
    (tmp_path / "mine.py").write_text(
        "def known(completions):\n"
        "    assert 'fail.' not in completions, 'asked to'\n"
        "    return [{'score': 1.0, 'letters': len(text)} for text in completions]\n"
    )
    config = RewardConfig(functions=[f"{tmp_path}/mine.py:known"], num_workers=1)
    prompts = [Prompt(place, np.array([0], np.int32), "q") for place in ids]
    failures = []

    async def work():
        workers = RewardWorkers(config)
        try:
            await workers.start()
            texts = lambda rows: ["".join(WORDS[i] for i in row) for row in rows]  # noqa: E731
            sampler = Sampler(None, interaction, texts, Scorer(config, workers, 3), {4})
            return await sampler.collect(prompts, Sampling(2, 1.0, 3, 0), (0, "train", 1), failures.append)
        finally:
            await workers.close()

    return asyncio.run(work()), failures


def test_truncated_completions_are_scored_and_failures_told(tmp_path):
    rollouts, failures = collect(tmp_path, [3, 1])
    assert [rollout.texts for rollout in rollouts] == [["fail."] * 2, ["a."] * 2]
    assert all(c.token_ids[-1] == 4 and c.finish_reason == "stop" for r in rollouts for c in r.completions)
    assert rollouts[0].scores.tolist() == [0, 0] and rollouts[1].scores.tolist() == [1, 1]
    assert rollouts[0].rewards["known/letters"].tolist() == [0, 0]  # of which nothing is known
    assert rollouts[1].rewards["known/letters"].tolist() == [2, 2]
    assert rollouts[0].events["known/errors"] == 2 and not any(rollouts[1].events.values())
    assert len(failures) == 2 and "'fail.', raised AssertionError: asked to" in failures[0]


def test_seeds_depend_on_every_part_and_leave_room_for_n():
    seeds = {
        derive_seed(seed, "train", step, prompt) for seed in range(3) for step in range(10) for prompt in range(100)
    }
    assert len(seeds) == 3000 and max(seeds) < 2**62
    ordered = sorted(seeds)
    assert min(b - a for a, b in zip(ordered, ordered[1:])) > 10_000
    assert derive_seed(0, "train", 1, 2) == derive_seed(0, "train", 1, 2) != derive_seed(0, "val", 1, 2)


def test_prompts_that_teach_nothing_are_replaced_while_rounds_last():
    calls = []

    async def collect(count, call):
        calls.append(count)
        # Of each call the first half, rounded down, differs; the others are idle.
        scores = [np.array([0.0, 1.0 if place < count // 2 else 0.0]) for place in range(count)]
        prompts = [Prompt(100 * call + place, np.zeros(1, np.int32), "") for place in range(count)]
        return [Rollout(prompt, [], s, {"r": s}, ["", ""]) for prompt, s in zip(prompts, scores, strict=True)]

    found = asyncio.run(refilled(collect, 8, rounds=2))
    assert calls == [8, 4, 2]
    assert [rollout.prompt.id for rollout in found] == [0, 1, 2, 3, 100, 101, 200, 201]
    assert [bool(np.ptp(rollout.scores)) for rollout in found] == [True] * 7 + [False]
    calls.clear()
    assert len(asyncio.run(refilled(collect, 8, rounds=0))) == 8 and calls == [8]
