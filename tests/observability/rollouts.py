"""Small rollouts with known numbers."""

import numpy as np

from megarl.types import Completion, Prompt, Rollout


def completion(length: int, finish_reason: str = "stop") -> Completion:
    return Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        finish_reason=finish_reason,
        loss_mask=np.ones(length, np.uint8),
        weight_version=np.zeros(length, np.int32),
    )


def rollout(
    scores: list[float], lengths: list[int], texts: list[str] | None = None, messages="1+1=", truth="2", id: int = 0
) -> Rollout:
    """One prompt of 3 tokens; a completion is cut off where its length is 9."""
    return Rollout(
        prompt=Prompt(id=id, token_ids=np.arange(3, dtype=np.int32), messages=messages, ground_truth=truth),
        completions=[completion(n, "length" if n == 9 else "stop") for n in lengths],
        scores=np.array(scores, np.float64),
        rewards={"sums": np.array(scores) * 2, "sums/acc": (np.array(scores) > 0.5).astype(np.float64)},
        texts=texts or [f"answer {k}" for k in range(len(scores))],
    )
