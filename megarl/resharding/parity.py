"""Parity: trainer and engines score the same fixed prompts under the same weights.

The audit (`audit.py`) proves that the raw weights arrived. What an engine makes of them (prepacked copies, transposed
or quantised kernels, a tied head's second copy) it does not see; the two sides' log-probs show it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megarl.config.root import TrainConfig
from megarl.data.batch import from_examples
from megarl.errors import MegarlError
from megarl.types import Batch

_SEQUENCES, _TOKENS = 16, 64
_BUDGETS = {"float32": 1e-3, "bfloat16": 0.5}


class Parity:
    """Scores fixed random token ids on both sides and compares."""

    def __init__(self, config: TrainConfig, vocab_size: int, logprobs: Callable[[Batch], torch.Tensor], driver):
        """Draw the prompts: up to 16 sequences of 64 ids, the same on every rank and in every run.

        Args:
            config: the run's.
            vocab_size: token ids are drawn from all of it.
            logprobs: the trainer's side: [N] float32 at temperature 1, of every token that loss_mask marks. Collective.
            driver: the rank's rollout driver, the engines' side.
        """
        length = max(2, min(_TOKENS, config.max_sequence_length - 1))  # the engine adds a token of its own
        draw = np.random.default_rng(0)
        self._sequences = [draw.integers(vocab_size, size=length, dtype=np.int32) for _ in range(_SEQUENCES)]
        self._batch = from_examples(
            [(ids[:1], ids[1:]) for ids in self._sequences], list(range(_SEQUENCES)), _SEQUENCES
        )
        self._logprobs, self._driver = logprobs, driver
        self._interval = config.sync.parity_interval
        dtypes = (config.actor.model.dtype, config.rollout.dtype or config.actor.model.dtype)
        self._budget = config.sync.parity_budget or max(_BUDGETS[dtype] for dtype in dtypes)  # the coarser side's

    def is_due(self, syncs: int) -> bool:
        """Whether sync number `syncs` (from 0) is checked: the first one after the engines' start, the first one that
        changed the weights, and every `sync.parity_interval` of them.
        """
        return syncs < 2 or (self._interval > 0 and syncs % self._interval == 0)

    def check(self, version: int) -> dict[str, float]:
        """Compare; collective.

        Returns:
            on rank 0: "parity/fixed_max_abs_logprob", the largest difference of a token's log-prob over all engines;
            "parity/fixed_k3", the mean of exp(d) - 1 - d with d = trainer's - engine's log-prob.

        Raises:
            MegarlError: on rank 0, the difference is over `sync.parity_budget`.
        """
        ours = self._logprobs(self._batch)[self._batch.loss_mask > 0].double()
        if not self._driver.num_engines:
            return {}
        largest, k3 = 0.0, []
        for index, scored in enumerate(self._driver.score(self._sequences)):
            gap = ours - torch.from_numpy(np.concatenate(scored)).double()
            worst = float(gap.abs().max())
            if not worst <= self._budget:  # a NaN is no parity either
                raise MegarlError(
                    f"trainer and engine {index} disagree about weight version {version}: on fixed prompts the "
                    f"log-prob of a token differs by {worst:.3g}; sync.parity_budget is {self._budget:g}. The weights "
                    "were delivered (the audit), so the engine installed them wrongly, or the two compute in "
                    "different types; see docs/bridge.md"
                )
            largest = max(largest, worst)
            k3.append(float((gap.exp() - 1 - gap).mean()))
        return {"parity/fixed_max_abs_logprob": largest, "parity/fixed_k3": sum(k3) / len(k3)}
