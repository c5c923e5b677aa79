"""What a difference of the log-probs may be, by the types that the two sides compute in."""

import pytest

from megarl.resharding.parity import Parity


@pytest.mark.parametrize(
    "trainer, engine, budget", [("float32", None, 1e-3), ("bfloat16", None, 0.5), ("bfloat16", "float32", 0.5)]
)
def test_the_budget_is_that_of_the_coarser_side(tiny_config, trainer, engine, budget):
    config = tiny_config({"actor": {"model": {"path": "none", "dtype": trainer}}, "rollout": {"dtype": engine}})
    assert Parity(config, 128, lambda batch: None, None)._budget == budget
