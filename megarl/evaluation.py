"""What held-out prompts say about a policy."""

import numpy as np

from megarl.types import Rollout


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
