"""What the policy-gradient algorithms share around their own loss: KL and entropy terms, engine correction, metrics.

loss = importance weight * policy loss + kl_loss_coef * KL - entropy_coeff * entropy
"""

import torch

from megarl.algorithms import importance, kl
from megarl.algorithms.interface import Needs
from megarl.algorithms.policy_ratio import Metrics, log_ratios
from megarl.algorithms.sequences import written
from megarl.config.base import key
from megarl.types import Batch


class PolicyLossConfig(kl.KLConfig):
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus: positive values favour higher entropy.")
    rollout_correction: importance.RolloutCorrectionConfig = key(
        importance.RolloutCorrectionConfig(), "Importance sampling between the engine and the trainer."
    )


def needs(config: PolicyLossConfig, **others: bool) -> Needs:
    """What the KL asks for, and others."""
    return Needs(
        reference=config.use_kl_loss or config.charges_reward,
        full_kl_in_reward=config.charges_reward and config.kl_penalty == "full",
        full_kl_in_loss=config.use_kl_loss and config.kl_loss_type == "full",
        **others,
    )


def finish(
    loss: torch.Tensor,
    metrics: Metrics,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    config: PolicyLossConfig,
    full_kl: torch.Tensor | None,
) -> tuple[torch.Tensor, Metrics]:
    """(loss [N], metrics [N]) of a policy loss [N]; all 0 on tokens that were not written, metrics without gradient."""
    if config.rollout_correction.rollout_is:
        loss = loss * importance.weights(batch, config.rollout_correction)
    entropy = written(entropy, batch)
    metrics = metrics | {
        "policy/approxkl_avg": 0.5 * log_ratios(logprobs, batch).square(),
        "policy/entropy_avg": entropy,
    }
    if config.use_kl_loss:
        divergence = kl.to_reference(logprobs, batch, config.kl_loss_type, full_kl)
        metrics["policy/kl_avg"] = divergence
        loss = loss + config.kl_loss_coef * divergence
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * entropy
    return written(loss, batch), {name: written(values, batch).detach() for name, values in metrics.items()}
