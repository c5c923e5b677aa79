"""Whitening against verl's, its definition, and over ranks."""

import numpy as np
import pytest
import torch

from megarl.algorithms import whitening
from tests.algorithms.batches import golden

GOLDEN = golden("whiten")


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_vectors(name):
    x, mask = torch.from_numpy(GOLDEN[f"{name}_x"]).flatten(), torch.from_numpy(GOLDEN[f"{name}_mask"]).flatten()
    for shift in (0, 1):
        found = whitening.whiten(x, mask, shift_mean=bool(shift))
        for peer in ("verl", "slime"):
            expected = torch.from_numpy(GOLDEN[f"{name}_{peer}_shift{shift}"]).flatten() * mask
            torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=1e-6)
    mean, variance = whitening.moments(x, mask)
    np.testing.assert_allclose([mean, variance], [GOLDEN[f"{name}_{k}"] for k in ("mean", "var_unbiased")], rtol=1e-9)


def test_the_definition():
    x = torch.tensor([1.0, 100.0, 2.0, 6.0], dtype=torch.float64)
    found = whitening.whiten(x, torch.tensor([1, 0, 1, 1]))
    np.testing.assert_allclose(found, np.array([-2, 0, -1, 3]) / np.sqrt(7 + 1e-8), rtol=1e-12)
    kept = whitening.whiten(x, torch.tensor([1, 0, 1, 1]), shift_mean=False)
    np.testing.assert_allclose(kept, (np.array([-2, 0, -1, 3]) / np.sqrt(7 + 1e-8) + 3) * [1, 0, 1, 1], rtol=1e-12)


@pytest.mark.parametrize(("values", "mask"), [([5.0], [1]), ([5.0, 5.0], [1, 1]), ([5.0, 1.0], [0, 0]), ([], [])])
def test_nothing_to_compare_with_is_zero(values, mask):
    assert not whitening.whiten(torch.tensor(values), torch.tensor(mask)).any()


def test_an_infinite_masked_value_does_not_count():
    found = whitening.whiten(torch.tensor([1.0, torch.inf, 2.0]), torch.tensor([1, 0, 1]))
    np.testing.assert_allclose(found, [-np.sqrt(0.5), 0, np.sqrt(0.5)], rtol=1e-6)
