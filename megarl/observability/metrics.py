"""Numbers about a step: where its time went, and what its rollouts look like."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from megarl.types import Rollout


class Phases:
    """Times the phases of a step: `with phases("generate"): ...`, then `phases.seconds()`.

    Args:
        clock: returns seconds. On an accelerator, one that waits for queued kernels first, so that each phase is
            charged with its own work.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`, even when the block raises."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def seconds(self) -> dict[str, float]:
        """Seconds per phase since the last reset, in the order of their first use."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget everything: a new step begins."""
        self._seconds = {}


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """What the rollouts of one step look like; every mean is over completions unless its name says otherwise.

    Returns:
        objective/scores: mean score (the weighted sum over the reward functions).
        reward/<function>, reward/<function>/<extra key>: means of each function's own numbers.
        reward/<function>/timeouts, crashes, errors, invalid: completions on which the function failed, how many.
        rollout/score_std_in_group: standard deviation over a prompt's completions (population), mean over prompts.
        rollout/zero_variance_groups: share of prompts whose completions all scored the same; they teach GRPO nothing.
        rollout/finished_share: share of completions that ended by themselves rather than at the length limit; TRL's
            name for it is val/contain_eos_token, which is there too.
        val/num_eos_tokens: how many end-of-sequence (or stop) tokens there are: at most one a completion.
        rollout/completions, rollout/tokens: how many completions, and completion tokens in all.
        response_length/mean, /min, /max and prompt_length/mean: in tokens.

    Raises:
        ValueError: there are no rollouts.
    """
    if not rollouts:
        raise ValueError("a step without rollouts has no metrics; data.train_batch_size must be at least 1")
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    reward_names = sorted({name for rollout in rollouts for name in rollout.rewards})
    rewards = {
        f"reward/{name}": np.concatenate([r.rewards[name] for r in rollouts if name in r.rewards]).mean()
        for name in reward_names
    }
    finished = np.array([completion.finish_reason == "stop" for completion in completions])
    events = Counter()
    for rollout in rollouts:
        events.update(rollout.events)
    metrics = {
        "objective/scores": np.concatenate([r.scores for r in rollouts]).mean(),
        **rewards,
        **{f"reward/{name}": count for name, count in events.items()},
        "rollout/score_std_in_group": np.mean([r.scores.std() for r in rollouts]),
        "rollout/zero_variance_groups": np.mean([np.ptp(r.scores) == 0 for r in rollouts]),
        "rollout/finished_share": finished.mean(),
        "val/contain_eos_token": finished.mean(),
        "val/num_eos_tokens": finished.sum(),
        "rollout/completions": len(completions),
        "rollout/tokens": lengths.sum(),
        "response_length/mean": lengths.mean(),
        "response_length/min": lengths.min(),
        "response_length/max": lengths.max(),
        "prompt_length/mean": np.mean([len(r.prompt.token_ids) for r in rollouts]),
    }
    return {name: float(value) for name, value in metrics.items()}
