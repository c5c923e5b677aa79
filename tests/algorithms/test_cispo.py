"""CISPO against verl's; a clipped token still learns."""

import numpy as np
import pytest
import torch

from megarl.algorithms import cispo
from tests.algorithms.batches import golden, pack, responses, run_loss

LOSSES = golden("policy_losses")


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (1.0, 4.0)])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses(name, low, high):
    mask = LOSSES[f"{name}_mask"]
    key = f"{name}_cispo_token-mean_lo{low}_hi{high}"
    batch, place = pack(mask, logprobs=LOSSES[f"{name}_old"], advantages=LOSSES[f"{name}_adv_seq"][:, None] * mask)
    logprobs = torch.from_numpy(LOSSES[f"{name}_new"]).flatten()[place.clamp(min=0)]
    config = cispo.Config(clip_ratio_low=low, clip_ratio_high=high)
    loss, gradient, metrics = run_loss(cispo, batch, logprobs, config)
    np.testing.assert_allclose(loss, LOSSES[key], rtol=1e-9)
    np.testing.assert_allclose(responses(gradient, place, mask.shape), LOSSES[key + "_grad"] * mask, atol=1e-9)
    assert metrics["policy/clipfrac_avg"] == pytest.approx(LOSSES[key + "_metrics"][0], abs=1e-6)


def test_the_definition():
    """Ratios 1, 3 (clipped to 1.28) and 1/2 (to 0.8): the slope is -clip(w) A on each."""
    batch, _ = pack(np.ones((1, 3)), logprobs=np.zeros((1, 3)), advantages=np.array([[1.0, 2.0, -1.0]]))
    logprobs = torch.tensor([5.0, 0.0, np.log(3), -np.log(2)], dtype=torch.float64)
    config = cispo.Config(clip_ratio_high=0.28)
    loss, gradient, metrics = run_loss(cispo, batch, logprobs, config)
    np.testing.assert_allclose(gradient * 3, [0, -1.0, -2.56, 0.8], atol=1e-12)
    assert loss * 3 == pytest.approx(-2.56 * np.log(3) - 0.8 * np.log(2))
    assert metrics["policy/clipfrac_avg"] == pytest.approx(2 / 3)
