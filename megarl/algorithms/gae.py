"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438), and the reward-to-go that it contains.

Over the written tokens t = 0 .. T-1 of a sequence, with V_T = 0:

    delta_t = r_t + gamma V_{t+1} - V_t             (eq. 10)
    A_t     = delta_t + gamma lam A_{t+1}           (eq. 16)
    return_t = A_t + V_t                            the critic's target

gamma = lam = 1 gives A_t = (r_t + ... + r_{T-1}) - V_t. Prompt and observation tokens are skipped without a discount:
V_{t+1} is the value at the next *written* token (verl 0.9.1, NeMo-RL). OpenRLHF and slime let them through as zeros,
which discounts once more for each and bootstraps from 0 at a hole; both agree where a response has no hole.
"""

import torch

from megarl.algorithms.sequences import Responses
from megarl.types import Batch


def discounted_sums(values: torch.Tensor, discount: float) -> torch.Tensor:
    """y [B, T] with y_t = x_t + discount * y_{t+1}, of x = values [B, T]."""
    out = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = values[:, t] + discount * running
        out[:, t] = running
    return out


def gae(rewards: torch.Tensor, batch: Batch, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [N], returns [N]) of rewards [N] and batch.values, in rewards' dtype; 0 on tokens not written."""
    responses = Responses(batch)
    rewards, values = responses.aligned(rewards), responses.aligned(batch.values.to(rewards.dtype))
    next_values = torch.nn.functional.pad(values[:, 1:], (0, min(1, values.shape[1])))
    advantages = discounted_sums(rewards + gamma * next_values - values, gamma * lam)
    return responses.packed(advantages), responses.packed(advantages + values)


def reward_to_go(rewards: torch.Tensor, batch: Batch, gamma: float = 1.0) -> torch.Tensor:
    """[N] r_t + gamma r_{t+1} + gamma^2 r_{t+2} + ... over the written tokens that follow; 0 on tokens not written."""
    responses = Responses(batch)
    return responses.packed(discounted_sums(responses.aligned(rewards), gamma))
