"""GSPO against verl's; its gradient is that of the sequence ratio."""

import numpy as np
import pytest
import torch

from megarl.algorithms import gspo
from tests.algorithms.batches import golden, pack, responses, run_loss

LOSSES = golden("policy_losses")


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.0003, 0.0004)])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses(name, low, high, mode):
    mask = LOSSES[f"{name}_mask"]
    advantages = LOSSES[f"{name}_adv_seq"][:, None] * mask
    batch, place = pack(mask, logprobs=LOSSES[f"{name}_old"], advantages=advantages)
    logprobs = torch.from_numpy(LOSSES[f"{name}_new"]).flatten()[place.clamp(min=0)]
    config = gspo.Config(clip_ratio_low=low, clip_ratio_high=high, loss_agg_mode=mode)
    loss, gradient, metrics = run_loss(gspo, batch, logprobs, config)
    key = f"{name}_gspo_{mode}_lo{low}_hi{high}"
    np.testing.assert_allclose(loss, LOSSES[key], rtol=1e-7)
    np.testing.assert_allclose(responses(gradient, place, mask.shape), LOSSES[key + "_grad"] * mask, atol=1e-9)
    assert metrics["policy/clipfrac_avg"] == pytest.approx(LOSSES[key + "_metrics"][0], abs=1e-6)


def test_the_gradient_is_that_of_the_sequence_ratio():
    random, mask = np.random.default_rng(0), np.array([[1, 0, 1, 1], [1, 1, 0, 0]])
    old, new = random.normal(size=(2, 2, 4))
    advantages = np.array([1.5, -0.5])
    batch, place = pack(mask, logprobs=old, advantages=advantages[:, None] * mask)
    logprobs = torch.from_numpy(new).flatten()[place.clamp(min=0)]
    found = run_loss(gspo, batch, logprobs, gspo.Config(clip_ratio_low=1, clip_ratio_high=1e9))
    current, mask = torch.from_numpy(new).requires_grad_(), torch.from_numpy(mask)
    ratio = (((current - torch.from_numpy(old)) * mask).sum(1) / mask.sum(1)).exp()
    loss = (-ratio * torch.from_numpy(advantages)).mean()
    (gradient,) = torch.autograd.grad(loss, current)
    assert found[0] == pytest.approx(loss.item(), abs=1e-12)
    np.testing.assert_allclose(responses(found[1], place, mask.shape), gradient, atol=1e-12)
