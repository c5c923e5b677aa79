"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled token alone.

With r = logprob - ref_logprob on a token drawn from the policy (J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html):

    kl, k1            r                         unbiased, may be negative;  d / d logprob = 1
    abs               |r|                       not an estimate of the KL, a distance;  sign(r)
    mse, k2           r^2 / 2                   biased, low variance;  r
    low_var_kl, k3    exp(-r) - 1 + r           unbiased, never negative;  1 - exp(-r)

Each is differentiable in logprob, as the loss term that it is: in expectation the gradient of k1 is zero, and that of
k2 is the KL's own. Clamps, as in verl: only k3 has them, r to [-20, 20] before the exponential and the value to
[-10, 10] after; beyond a clamp the gradient is 0, and so far from the reference k3 underestimates.
"""

from typing import Literal

import torch

KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


def per_token(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KLType) -> torch.Tensor:
    """The estimate for each token, in nats, shaped like logprobs. Raises ValueError for an unknown kind."""
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
    raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(KLType.__args__)}")
