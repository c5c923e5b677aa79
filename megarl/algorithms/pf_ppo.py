"""PF-PPO: a step's completions are drawn again, with replacement, by what their scores can teach (arXiv 2409.06957).

    pow           weight |score|^weight_pow
    max_min       1 for the completions with the highest and the lowest score, else 0
    max_random    0.4 for those with the highest score, 0.1 for all others

each + 1e-8 (verl's values; the paper's are similar). As many completions are drawn as there were, after they are scored
and before they are distributed, so everything that follows (advantages, whitening, mini-batches) sees the drawn ones.
"""

from typing import Literal

import numpy as np
import torch

from megarl.config.base import Section, key
from megarl.types import Rollout


class PFPPOConfig(Section):
    reweight_method: Literal["pow", "max_min", "max_random"] = key("pow", "How a score becomes a weight.")
    weight_pow: float = key(2.0, "The power of |score|, for pow.", gt=0)


def weights(scores: torch.Tensor, config: PFPPOConfig) -> torch.Tensor:
    """[B] of scores [B]; not normalised."""
    if config.reweight_method == "pow":
        weights = scores.abs().pow(config.weight_pow)
    elif config.reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    else:
        weights = torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    return weights + 1e-8


def draw(scores: torch.Tensor, config: PFPPOConfig, generator: torch.Generator) -> torch.Tensor:
    """[B] int64: which of the scores [B] were drawn. The generator advances; save its state with the run."""
    return torch.multinomial(weights(scores, config), len(scores), replacement=True, generator=generator)


def resampled(rollouts: list[Rollout], config: PFPPOConfig, generator: torch.Generator) -> list[Rollout]:
    """The drawn completions under their prompts, in the rollouts' order; prompts of which none was drawn are left out.

    A prompt may then have more or fewer completions than rollout.n; the step has as many as before.
    """
    scores = np.concatenate([rollout.scores for rollout in rollouts])
    times = torch.bincount(draw(torch.from_numpy(scores), config, generator), minlength=len(scores)).numpy()
    drawn, start = [], 0
    for rollout in rollouts:
        rows = np.repeat(np.arange(len(rollout.scores)), times[start : start + len(rollout.scores)])
        start += len(rollout.scores)
        if len(rows):
            drawn.append(
                Rollout(
                    prompt=rollout.prompt,
                    completions=[rollout.completions[row] for row in rows],
                    scores=rollout.scores[rows],
                    rewards={name: values[rows] for name, values in rollout.rewards.items()},
                    texts=[rollout.texts[row] for row in rows],
                )
            )
    return drawn
