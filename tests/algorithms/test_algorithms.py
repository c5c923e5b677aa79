"""Lookup by name, what every algorithm file holds, and what is refused."""

import pytest
from pydantic import ValidationError

from megarl import algorithms
from megarl.config.algorithm import AlgorithmConfig

KNOWN = ["cispo", "dapo", "dr_grpo", "gspo", "grpo", "online_dpo", "ppo", "reinforce_plus_plus"]
KNOWN = sorted([*KNOWN, "reinforce_plus_plus_baseline", "remax", "rloo"])


def config_of(name, **keys):
    return algorithms.get(name).Config(**({"loss_scale_factor": 8} if name == "dr_grpo" else {}) | keys)


def test_names_are_the_algorithm_files():
    assert algorithms.names() == KNOWN


@pytest.mark.parametrize("name", ["gppo", "kl", "aggregation", "interface"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=f"name='{name}' is not known; the known algorithms are {', '.join(KNOWN)}"):
        algorithms.get(name)


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_is_whole_in_its_file(name):
    module = algorithms.get(name)
    assert issubclass(module.Config, AlgorithmConfig)
    assert module.Config.model_fields["name"].default == name
    for function in ("needs", "advantages", "weights", "token_loss"):
        assert getattr(module, function).__module__ == module.__name__
    undescribed = [key for key, field in module.Config.model_fields.items() if not field.description]
    assert not undescribed
    assert "arXiv" in module.__doc__


@pytest.mark.parametrize("name", sorted({*algorithms.names()} - {"online_dpo"}))
def test_the_kl_stands_in_one_place(name):
    with pytest.raises(ValidationError, match="use_kl_in_reward and algorithm.use_kl_loss .* are both true"):
        config_of(name, use_kl_in_reward=True, use_kl_loss=True)
    needs = algorithms.get(name).needs
    assert not needs(config_of(name)).reference
    assert needs(config_of(name, use_kl_loss=True)).reference
    assert needs(config_of(name, use_kl_in_reward=True)).reference
    assert not needs(config_of(name, use_kl_in_reward=True, kl_ctrl={"kl_coef": 0})).reference
    assert needs(config_of(name, use_kl_loss=True, kl_loss_type="full")).full_kl_in_loss
    assert needs(config_of(name, use_kl_in_reward=True, kl_penalty="full")).full_kl_in_reward
    assert not needs(config_of(name, kl_loss_type="full", kl_penalty="full")).full_kl_in_loss
    assert config_of(name).kl_controller().value == 0.0
    assert config_of(name, use_kl_in_reward=True).kl_controller().value == 0.001


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "remax", "reinforce_plus_plus"])
@pytest.mark.parametrize("bound", [1.0, 0.5, -3.0])
def test_the_dual_clip_is_above_one(name, bound):
    with pytest.raises(ValidationError, match="greater than 1"):
        config_of(name, clip_ratio_c=bound)


@pytest.mark.parametrize(
    ("name", "wrong", "right"), [("rloo", 1, 2), ("reinforce_plus_plus_baseline", 1, 2), ("online_dpo", 3, 2)]
)
def test_the_group_size_suits_the_algorithm(name, wrong, right):
    config_of(name).check_group_size(right)
    with pytest.raises(ValueError, match=f"rollout.n={wrong}"):
        config_of(name).check_group_size(wrong)


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
def test_others_take_any_group_size(name):
    config_of(name).check_group_size(1)
