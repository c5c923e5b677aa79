"""What held-out prompts say about a policy: accuracy, pass@k and maj@k, with intervals; `megarl evaluate`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import comb
from pathlib import Path

import numpy as np

from megarl.config.root import TrainConfig
from megarl.rollout.handle import RolloutDriver
from megarl.types import Rollout

_RESAMPLES = 1000
_SUBSETS = 64
Interval = tuple[float, float, float]  # mean, and the ends of its 95 % interval


def accuracies(rollouts: list[Rollout]) -> np.ndarray:
    """Accuracy of every completion, one number each [prompts * n].

    A reward function that returns "acc" beside its score defines it (the first such function, if several do); without
    one the score itself is taken.
    """
    named = [name for name in rollouts[0].rewards if name.endswith("/acc")]
    return np.concatenate([r.rewards[named[0]] if named else r.scores for r in rollouts])


def heldout_metrics(validated: dict[str, list[Rollout]]) -> dict[str, float]:
    """heldout/<kind>_accuracy, _score and _response_length for each kind of decoding ("sampled", "greedy")."""
    metrics = {}
    for kind, rollouts in validated.items():
        lengths = [len(c.token_ids) for r in rollouts for c in r.completions]
        metrics[f"heldout/{kind}_accuracy"] = float(accuracies(rollouts).mean())
        metrics[f"heldout/{kind}_score"] = float(np.concatenate([r.scores for r in rollouts]).mean())
        metrics[f"heldout/{kind}_response_length"] = float(np.mean(lengths))
    return metrics


def bootstrap(values: np.ndarray, seed: int = 0) -> Interval:
    """Mean of one number per prompt [P] and its 95 % percentile interval over resampled prompts."""
    draws = np.random.default_rng(seed).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """[P] the chance that k of a prompt's n completions hold a right one, unbiased (arXiv 2107.03374, eq. 1).

    Args:
        correct: [P, n] of 0 and 1.
        k: at most n.
    """
    n = correct.shape[1]
    wrong = n - correct.sum(1).astype(int)
    return np.array([1.0 - comb(int(w), k) / comb(n, k) for w in wrong])


def majority_at_k(answers: list[list[str]], correct: np.ndarray, k: int, seed: int = 0) -> np.ndarray:
    """[P] the chance that the most frequent answer among k completions is right (self-consistency, arXiv 2203.11171).

    For k below n the mean over 64 seeded subsets; among equally frequent answers the one that came first wins.

    Args:
        answers: of each prompt its n answers.
        correct: [P, n] of 0 and 1.
    """
    n, draw = correct.shape[1], np.random.default_rng(seed)
    subsets = [np.arange(n)] if k == n else [draw.permutation(n)[:k] for _ in range(_SUBSETS)]
    found = []
    for said, right in zip(answers, correct, strict=True):
        wins = 0.0
        for subset in subsets:
            winner = Counter(said[i] for i in subset).most_common(1)[0][0]
            wins += right[next(i for i in subset if said[i] == winner)]
        found.append(wins / len(subsets))
    return np.array(found)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i < n} | {n})


def report(validated: dict[str, list[Rollout]], answer: str | None = None) -> dict[str, Interval]:
    """Every figure of an evaluation by its name: greedy and sampled accuracy, pass@k and maj@k for k = 1, 2, 4, ... n.

    Args:
        validated: {"greedy": rollouts, "sampled": rollouts with n completions each}.
        answer: a regular expression whose first group (or whole match) is what maj@k counts; its last match is taken.
            Left out, the whole text.
    """
    found: dict[str, Interval] = {}
    for kind, rollouts in validated.items():
        n = len(rollouts[0].completions)
        found[f"{kind} accuracy"] = bootstrap(accuracies(rollouts).reshape(-1, n).mean(1))
    sampled = validated["sampled"]
    correct = (accuracies(sampled).reshape(len(sampled), -1) >= 1.0).astype(float)
    answers = [[_answer(text, answer) for text in rollout.texts] for rollout in sampled]
    for k in powers_of_two(correct.shape[1]):
        found[f"pass@{k}"] = bootstrap(pass_at_k(correct, k))
        found[f"maj@{k}"] = bootstrap(majority_at_k(answers, correct, k))
    return found


def _answer(text: str, pattern: str | None) -> str:
    if pattern is None:
        return text.strip()
    matches = list(re.finditer(pattern, text))
    return "" if not matches else matches[-1][min(1, matches[-1].re.groups)].strip()


def evaluate(
    config: TrainConfig, run_dir: Path, on_progress: Callable[[str], None], answer: str | None = None
) -> dict[str, Interval]:
    """Sample `data.val_files` with the model `actor.model.path` and report. Needs engines only, no trainer ranks.

    Raises:
        ValueError: no held-out files, no reward function to say what is right, or a bad pattern.
        MegarlError: an engine or a reward function failed.
    """
    if not config.data.val_files:
        raise ValueError("there is nothing to evaluate on: set data.val_files")
    if not config.reward.functions:
        raise ValueError(
            "nothing says which answers are right: set reward.functions (the reward model of reward_model.path needs "
            "trainer ranks, which `megarl evaluate` does not start)"
        )
    try:
        re.compile(answer or "")
    except re.error as error:
        raise ValueError(f"--answer {answer!r} is no regular expression: {error}") from error
    with RolloutDriver.start(config, run_dir) as driver:
        driver.wait_until_ready(on_progress)
        return report(driver.validate(0), answer)
