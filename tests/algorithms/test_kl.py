"""KL estimators against verl's values and gradients, and against the exact KL."""

import numpy as np
import pytest
import torch

from megarl.algorithms import kl
from tests.algorithms.batches import golden

GOLDEN = golden("kl_estimators")


@pytest.mark.parametrize("kind", kl.Estimator.__args__)
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


def test_the_exact_kl_of_the_golden_vectors():
    """k1 averaged over the whole vocabulary; k1 has no clamp."""
    policy = torch.from_numpy(GOLDEN["logits_full"]).log_softmax(-1)
    reference = torch.from_numpy(GOLDEN["ref_logits_full"]).log_softmax(-1)
    average = (policy.exp() * kl.per_token(policy, reference, "k1")).sum(-1)
    np.testing.assert_allclose(average, GOLDEN["exact_full_kl"], atol=1e-9)


def test_an_unknown_estimator_lists_the_known():
    with pytest.raises(ValueError, match="'full' is not one of kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl.per_token(torch.zeros(1), torch.zeros(1), "full")


@pytest.mark.parametrize(
    ("kind", "peer"),
    [
        *((kind, f"{system}_{kind}") for system in ("slime", "openrlhf", "nemo") for kind in ("k1", "k2", "k3")),
        ("low_var_kl", "slime_low_var_kl"),
    ],
)
def test_golden_vectors_of_others_within_their_clamps(kind, peer):
    """Where neither system clamps."""
    logprob, reference = torch.from_numpy(GOLDEN["logprob"]), torch.from_numpy(GOLDEN["ref_logprob"])
    near = (logprob - reference).abs() < 2.0
    estimate = kl.per_token(logprob, reference, kind)
    np.testing.assert_allclose(estimate[near], GOLDEN[peer][near], rtol=1e-5, atol=1e-6)
    assert near.sum() > 10


def test_the_types_are_the_estimators_and_full():
    assert kl.KLType.__args__ == (*kl.Estimator.__args__, "full")
