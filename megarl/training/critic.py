"""The critic: a value for the state before every token, learnt by a clipped regression on the returns."""

import torch

from megarl.algorithms import aggregation, value_loss
from megarl.config.model import ModelConfig, OptimConfig
from megarl.parallel.layout import Layout
from megarl.training.megatron_model import MegatronModel, onto_tokens, weighted
from megarl.types import Batch


class Critic(MegatronModel):
    """A transformer with a value head on all ranks. Every method is collective; a batch is the rank's own share."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        optim: OptimConfig | None = None,
        optimizer_steps: int = 0,
        cliprange_value: float = 0.5,
        vf_coef: float = 1.0,
    ):
        """Load a checkpoint, of a sequence classifier or of a causal model; arguments and errors as for MegatronModel.

        cliprange_value: value_loss.py. vf_coef: multiplies the loss; see config/critic.py for what that does.
        """
        super().__init__(model, layout, optim, optimizer_steps, value_head=True)
        self._cliprange_value, self._vf_coef = cliprange_value, vf_coef

    def values(self, batch: Batch, max_tokens: int) -> torch.Tensor:
        """[N] fp32: on each token that loss_mask marks the value of the state before it; 0 elsewhere."""
        found = self._map(batch, max_tokens, lambda values, micro: {"values": onto_tokens(values[:, 0], micro)})
        return found["values"]

    def gradients(self, batch: Batch, max_tokens: int) -> dict[str, float]:
        """Forward and backward of one mini-batch: afterwards main_grad holds the gradient of vf_coef * value loss.

        The value loss is a mean over all of the mini-batch's loss_mask tokens, of all ranks.

        Args:
            batch: this rank's share of the mini-batch with `values` (before the update) and `returns`; a placeholder
                where it has none.
            max_tokens: tokens per micro-batch; changes memory and speed only.

        Returns:
            "loss", the value loss without vf_coef; the means of value_loss.token_loss's metrics; "tokens".
        """
        weights = aggregation.token_weights(batch, "token-mean", sum_over_ranks=self.sum_over_dp)

        def output_loss(values, micro):
            values = onto_tokens(values[:, 0], micro)
            loss, metrics = value_loss.token_loss(values, micro, self._cliprange_value)
            return weighted(loss, micro), metrics

        found = self._gradients(batch.with_(token_weights=self._vf_coef * weights), output_loss, max_tokens)
        return found | {"loss": found["loss"] / self._vf_coef}

    def update(self, batch: Batch, max_tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch: `gradients`, clip, Adam, schedule.

        Returns:
            what `gradients` returns, and "grad_norm" (of vf_coef * loss, before clipping) and "lr".

        Raises:
            MegarlError: the gradient is not finite.
        """
        return self._step(self.gradients(batch, max_tokens))
