"""Lookup by name, and what every algorithm file holds."""

import pytest

from megarl import algorithms
from megarl.config.algorithm import AlgorithmConfig


def test_names_are_the_algorithm_files():
    assert algorithms.names() == ["grpo"]


@pytest.mark.parametrize("name", ["gppo", "kl", "aggregation", "interface"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=f"algorithm.name='{name}' is not known; the known algorithms are grpo"):
        algorithms.get(name)


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_is_whole_in_its_file(name):
    module = algorithms.get(name)
    assert issubclass(module.Config, AlgorithmConfig)
    for function in ("needs", "advantages", "weights", "token_loss"):
        assert getattr(module, function).__module__ == module.__name__
    undescribed = [key for key, field in module.Config.model_fields.items() if not field.description]
    assert not undescribed
