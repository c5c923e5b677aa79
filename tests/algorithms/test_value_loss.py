"""The critic's loss against verl's, its definition and its gradient."""

import numpy as np
import pytest
import torch

from megarl.algorithms import aggregation, value_loss
from tests.algorithms.batches import golden, pack, responses, take

GOLDEN = golden("value_loss")
MODES = aggregation.LossAggMode.__args__


@pytest.mark.parametrize("clip", [0.2, 0.5, 1000000000.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(name, mode, clip):
    mask = GOLDEN[f"{name}_mask"]
    batch, place = pack(mask, values=GOLDEN[f"{name}_old_values"], returns=GOLDEN[f"{name}_returns"])
    values = torch.from_numpy(GOLDEN[f"{name}_vpreds"]).flatten()[place.clamp(min=0)].requires_grad_()
    weights = aggregation.token_weights(batch, mode, mask.shape[1])
    loss, metrics = value_loss.token_loss(values, batch, clip)
    total = (weights * loss).sum()
    (gradient,) = torch.autograd.grad(total, values)
    key = f"{name}_{mode}_clip{clip}"
    np.testing.assert_allclose(total.item(), GOLDEN[key], rtol=2e-8)
    np.testing.assert_allclose(responses(gradient, place, mask.shape), GOLDEN[f"{key}_grad"] * mask, atol=1e-9)
    clipfrac = metrics["val/clipfrac_avg"].sum() / batch.loss_mask.sum()
    assert clipfrac.item() == pytest.approx(float(GOLDEN[f"{key}_clipfrac"]), abs=1e-7)
    micro_batches = [take(batch, rows) for rows in ([2, 0], [3], [1], list(range(4, len(mask))))]
    parts = [(weights[at] * value_loss.token_loss(values[at], part, clip)[0]).sum() for part, at in micro_batches]
    assert sum(parts).item() == pytest.approx(total.item(), abs=1e-12)


def test_the_definition():
    """Old value 0, return 1, range 0.5: a step beyond 0.5 learns nothing more, one away from the return does."""
    batch, _ = pack(np.ones((1, 4)), values=np.zeros((1, 4)), returns=np.ones((1, 4)))
    values = torch.tensor([9.0, 0.2, 0.8, 3.0, -0.8], dtype=torch.float64, requires_grad=True)
    loss, metrics = value_loss.token_loss(values, batch, 0.5)
    np.testing.assert_allclose(loss.detach(), [0, 0.32, 0.125, 2.0, 1.62], atol=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(loss.sum(), values)[0], [0, -0.8, 0, 2.0, -1.8], atol=1e-12)
    assert metrics["val/clipfrac_avg"].tolist() == [0, 0, 1, 0, 0]
    assert metrics["val/value_avg"][0] == metrics["val/error_avg"][0] == 0


def test_what_is_masked_out_cannot_spoil_it():
    batch, _ = pack(np.array([[1, 0, 1]]), values=np.zeros((1, 3)), returns=np.ones((1, 3)))
    values = torch.tensor([torch.nan, 0.5, torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    loss, metrics = value_loss.token_loss(values, batch, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert all(torch.isfinite(x).all() for x in (loss, gradient, *metrics.values())) and gradient[0] == gradient[2] == 0
