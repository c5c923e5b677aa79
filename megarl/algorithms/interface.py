"""What every algorithm file of this folder holds, and the two small things they share.

    Config(AlgorithmConfig)                                     its keys under `algorithm.`, and check_group_size(n)
    Config.kl_controller() -> KLController                      the course of the KL coefficient (kl_control.py)
    needs(config) -> Needs                                      what the trainer must put into the Batch
    advantages(batch, config, sum_over_ranks, kl_coef) -> Batch fills advantages [N] (PPO: returns [N] too; with a KL
                                                                in the reward: reward_kl [N]), once per step
    weights(batch, config, sum_over_ranks) -> [N] float32       the token weights of one mini-batch's loss
    token_loss(logprobs [N], entropy [N], batch, config, full_kl=None) -> (loss [N], metrics: {name: [N]})

The trainer minimises sum(batch.token_weights * loss), summed over micro-batches and ranks. Metrics are averaged over
the loss_mask tokens of the whole mini-batch; metrics.finished() then makes what is no mean over tokens out of them.
A sequence is never cut by a micro-batch, so sequence-level losses find their sequences whole.

kl_coef is the controller's present value (0.0 without a KL in the reward). The exact full-vocabulary KL is no function
of sampled tokens, so it is computed where the logits are: for the reward as Batch.full_kl, for the loss as `full_kl`
[N], differentiable, 0 where loss_mask is 0; both in nats, on the token that the distribution is about.

Everything is pure: tensors in, tensors out, no process group. What is global comes in as `sum_over_ranks`: it takes a
float64 tensor of a shape that is the same on every rank, and returns its sum over the data-parallel ranks. It is a
collective: every rank calls it equally often, with or without sequences. Estimators compute in float64 and return
loss_mask's dtype (float32).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Needs:
    """What the trainer must put into the Batch, beyond the policy's own log-probs, and how it must cut it."""

    reference: bool = False  # Batch.ref_logprobs, from the frozen reference model
    critic: bool = False  # Batch.values before advantages(); afterwards the critic learns Batch.returns
    full_kl_in_reward: bool = False  # Batch.full_kl before advantages()
    full_kl_in_loss: bool = False  # token_loss's full_kl
    greedy_baseline: bool = False  # Batch.baseline_scores: one greedy completion per prompt, scored, not trained on
    per_token_loss: bool = False  # token_loss of a token depends on no other token's log-prob, entropy or KL
    whole_groups: bool = False  # no group is cut by a rank, a mini-batch or a micro-batch
    resample: bool = False  # rollouts go through pf_ppo.resampled() once they are scored


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return tensor
