"""KL(policy || reference): per-token estimators, and the keys that put it into the reward or into the loss.

With r = logprob - ref_logprob on a token drawn from the policy (J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html):

    kl, k1            r                         unbiased, may be negative;  d / d logprob = 1
    abs               |r|                       not an estimate of the KL, a distance;  sign(r)
    mse, k2           r^2 / 2                   biased, low variance;  r
    low_var_kl, k3    exp(-r) - 1 + r           unbiased, never negative;  1 - exp(-r)
    full              sum_v p_v (log p_v - log q_v), the KL itself: computed where the logits are (interface.py)

Each is differentiable in logprob, as the loss term that it is: in expectation the gradient of k1 is zero, and that of
k2 is the KL's own. Clamps, as in verl: only k3 has them, r to [-20, 20] before the exponential and the value to
[-10, 10] after; beyond a clamp the gradient is 0, and so far from the reference k3 underestimates. OpenRLHF and NeMo-RL
clamp every estimator.
"""

from typing import Literal

import torch
from pydantic import model_validator

from megarl.algorithms import kl_control
from megarl.algorithms.sequences import written
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch

Estimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"]


class KLConfig(AlgorithmConfig):
    """The two places of the KL; it stands in one of them at most."""

    use_kl_in_reward: bool = key(False, "Charge each token's KL to the frozen reference in the reward.")
    kl_penalty: KLType = key("kl", "Its estimator there: kl (k1), abs, mse (k2), low_var_kl (k3) or full (exact).")
    kl_ctrl: kl_control.KLControlConfig = key(kl_control.KLControlConfig(), "Its coefficient there, over the run.")
    use_kl_loss: bool = key(False, "Add the KL to the frozen reference to the loss; loads the reference.")
    kl_loss_coef: float = key(0.001, "Weight of the KL in the loss.", ge=0)
    kl_loss_type: KLType = key("low_var_kl", "Its estimator there: kl (k1), abs, mse (k2), low_var_kl (k3) or full.")

    @model_validator(mode="after")
    def _one_place(self):
        if self.use_kl_in_reward and self.use_kl_loss:
            raise ValueError(
                "algorithm.use_kl_in_reward and algorithm.use_kl_loss (actor.use_kl_loss) are both true: the KL would "
                "be charged twice; keep one of them"
            )
        return self

    @property
    def charges_reward(self) -> bool:
        return self.use_kl_in_reward and self.kl_ctrl.kl_coef > 0

    def kl_controller(self) -> kl_control.KLController:
        """The coefficient that advantages() is given; 0 throughout without a KL in the reward."""
        return kl_control.controller(self.kl_ctrl) if self.use_kl_in_reward else kl_control.Fixed(0.0)


def per_token(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: Estimator) -> torch.Tensor:
    """The estimate for each token, in nats, shaped like logprobs. Raises ValueError for any other kind."""
    log_ratio = logprobs - ref_logprobs
    if kind in ("kl", "k1"):
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind in ("mse", "k2"):
        return 0.5 * log_ratio.square()
    if kind in ("low_var_kl", "k3"):
        negative = (-log_ratio).clamp(-20.0, 20.0)
        return (negative.exp() - negative - 1.0).clamp(-10.0, 10.0)
    raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(Estimator.__args__)}")


def to_reference(
    logprobs: torch.Tensor, batch: Batch, kind: KLType, full_kl: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] the KL of the policy with these log-probs [N] from batch.ref_logprobs, 0 on tokens that were not written."""
    if kind == "full":
        assert full_kl is not None, "the exact KL is computed where the logits are, and handed over"
        return written(full_kl, batch)
    return per_token(written(logprobs, batch), written(batch.ref_logprobs, batch), kind)
