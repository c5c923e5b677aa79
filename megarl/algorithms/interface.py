"""What every algorithm file of this folder holds, and the two small things they share.

    Config(AlgorithmConfig)                                     its keys under `algorithm.`
    needs(config) -> Needs                                      which other models it must be given scores of
    advantages(batch, config, sum_over_ranks) -> Batch          fills batch.advantages [N], once per batch of rollouts
    weights(batch, config, sum_over_ranks) -> [N] float32       the token weights of one mini-batch's loss
    token_loss(logprobs [N], entropy [N], batch, config) -> (loss [N], metrics: {name: [N]})

The trainer minimises sum(batch.token_weights * loss), summed over micro-batches and ranks; metrics are averaged over
the loss_mask tokens of the whole mini-batch. Everything is pure: tensors in, tensors out, no process group. What is
global comes in as `sum_over_ranks`: it takes a float64 tensor of a shape that is the same on every rank, and returns
its sum over the data-parallel ranks. It is a collective: every rank calls it equally often, with or without sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Needs:
    """What the trainer must put into the Batch for token_loss(), beyond the policy's own log-probs."""

    reference: bool  # Batch.ref_logprobs, from the frozen reference model


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return tensor
