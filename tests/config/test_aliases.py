import pytest

from megarl import algorithms
from megarl.config.aliases import SFT, TRAIN, convert, resolve
from megarl.config.root import SFTConfig, TrainConfig
from megarl.config.schema import plain_keys, schema


def keys(root):
    sections = [algorithms.get(name).Config for name in algorithms.names()] if root is TrainConfig else []
    schemas = [schema(root, algorithm=section) for section in sections] or [schema(root)]
    return {name for known in schemas for name in plain_keys(known)}


@pytest.mark.parametrize(("root", "table"), [(TrainConfig, TRAIN), (SFTConfig, SFT)])
def test_aliases_stand_for_keys_that_exist_and_hide_none(root, table):
    known = keys(root)
    assert {target for targets in table.values() for target in targets} <= known
    assert not set(table) & set(schema(root)) and not set(table) & known


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("actor_rollout_ref.model.path", "actor.model.path"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optim.lr"),
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_loss"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout.ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "parallel.tensor_model_parallel_size"),
        ("trainer.total_training_steps", "trainer.total_steps"),
        ("num_generation", "rollout.n"),
        ("rollout.n", "rollout.n"),
    ],
)
def test_spellings_that_guides_taught(spelling, key):
    assert resolve(spelling, TrainConfig) == (key,)


def test_ppo_by_the_name_of_its_estimator():
    """verl's algorithm.adv_estimator=gae."""
    assert convert("algorithm.adv_estimator", "gae") == "ppo" and convert("algorithm.adv_estimator", "rloo") == "rloo"
    assert convert("algorithm.name", "gae") == "gae"  # megarl's own key has no such value


def test_supervised_training_has_its_own_table():
    assert resolve("learning_rate", SFTConfig) == ("optim.lr",)
    assert resolve("actor_rollout_ref.rollout.n", SFTConfig) == ("actor_rollout_ref.rollout.n",)
