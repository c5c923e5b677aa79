"""KL estimators against verl's values and gradients, and against the exact KL."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.algorithms import kl

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "kl_estimators.npz")


@pytest.mark.parametrize("kind", kl.KLType.__args__)
def test_golden_vectors(kind):
    """Two of the tokens are extreme enough to reach k3's clamps."""
    logprob = torch.from_numpy(GOLDEN["logprob"]).requires_grad_()
    estimate = kl.per_token(logprob, torch.from_numpy(GOLDEN["ref_logprob"]), kind)
    estimate.sum().backward()
    np.testing.assert_allclose(estimate.detach(), GOLDEN[f"verl_{kind}"], atol=1e-9)
    np.testing.assert_allclose(logprob.grad, GOLDEN[f"verl_{kind}_grad"], atol=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl(kind):
    """Averaged over the whole vocabulary under the policy, instead of over samples; near enough for k3's clamps."""
    policy = torch.from_numpy(GOLDEN["logits_full"] * 0.3).log_softmax(-1)
    reference = torch.from_numpy(GOLDEN["ref_logits_full"] * 0.3).log_softmax(-1)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="none").sum(-1)
    average = (policy.exp() * kl.per_token(policy, reference, kind)).sum(-1)
    np.testing.assert_allclose(average, exact, atol=1e-9)


def test_the_gradient_of_k2_averages_to_that_of_the_kl():
    logits = torch.from_numpy(GOLDEN["logits_full"]).requires_grad_()
    reference = torch.from_numpy(GOLDEN["ref_logits_full"]).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((policy.exp().detach() * kl.per_token(policy, reference, "k2")).sum(), logits)
    np.testing.assert_allclose(estimated, exact, atol=1e-9)


def test_an_unknown_estimator_lists_the_known():
    with pytest.raises(ValueError, match="'full' is not one of kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl.per_token(torch.zeros(1), torch.zeros(1), "full")
