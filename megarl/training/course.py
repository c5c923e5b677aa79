"""What an algorithm carries from step to step, besides the models: the KL coefficient and the draws of its filter."""

from typing import Any

import torch

from megarl.algorithms import importance, objective, pf_ppo, policy_loss
from megarl.algorithms.interface import SumOverRanks
from megarl.config.root import TrainConfig
from megarl.types import Batch, Rollout


class Course:
    """The algorithm over the steps of a run. `state` is saved with the run."""

    def __init__(self, algorithm, config: TrainConfig, num_prompts: int):
        """
        Args:
            algorithm: a module of megarl/algorithms.
            config: the run's.
            num_prompts: of the training data, for coefficients that change with each pass over it; 0 in a replay, which
                then stays in its first pass.
        """
        self._algorithm, self._config, self._num_prompts = algorithm, config, num_prompts
        self._resamples = algorithm.needs(config.algorithm).resample
        self._kl = config.algorithm.kl_controller()
        self._draws = torch.Generator().manual_seed(config.trainer.seed)

    def chosen(self, rollouts: list[Rollout] | None) -> list[Rollout] | None:
        """The rollouts that are learnt from: all, or those that the algorithm draws from them. None off rank 0."""
        if rollouts is None or not self._resamples:
            return rollouts
        return pf_ppo.resampled(rollouts, self._config.algorithm.pf_ppo, self._draws)

    def advantages(self, batch: Batch, sum_over_ranks: SumOverRanks, step: int) -> tuple[Batch, dict[str, float]]:
        """The batch with what the algorithm estimates, and the metrics of the step's objective. Collective.

        Afterwards the KL coefficient is the next step's.
        """
        settings = self._config.algorithm
        filled = self._algorithm.advantages(batch, settings, sum_over_ranks, self._kl.value)
        metrics = objective.metrics(filled.with_(loss_mask=batch.loss_mask), sum_over_ranks, self._kl.value)
        corrected = isinstance(settings, policy_loss.PolicyLossConfig)
        correction = settings.rollout_correction if corrected else importance.RolloutCorrectionConfig()
        metrics |= importance.metrics(batch, correction, sum_over_ranks)
        drawn = step * self._config.data.train_batch_size
        epoch = drawn // self._num_prompts if self._num_prompts else 0
        self._kl.update(metrics.get("objective/kl_per_token", 0.0), batch.num_sequences, epoch)
        return filled, metrics

    def state(self) -> dict[str, Any]:
        """Plain JSON types; `restore` continues from there."""
        return {"kl": self._kl.state(), "draws": self._draws.get_state().tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._kl.restore(state["kl"])
        self._draws.set_state(torch.tensor(state["draws"], dtype=torch.uint8))
