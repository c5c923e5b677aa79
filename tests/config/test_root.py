"""What only holds between sections, of `megarl train` and `megarl reward-model`."""

import pytest

from megarl import algorithms
from megarl.config.root import RewardModelTrainConfig
from megarl.training.check import check, without_effect

PREFERENCES = {
    "trainer": {"output_dir": "out", "total_steps": 1, "n_gpus_per_node": 2},
    "model": {"path": "m"},
    "data": {"train_files": "a.jsonl", "train_batch_size": 4, "max_length": 64},
    "max_token_len_per_gpu": 128,
}


def with_algorithm(tiny_config, changes: dict, **settings):
    config = tiny_config(changes)
    return config.model_copy(update={"algorithm": algorithms.get(settings["name"]).Config(**settings)})


def test_the_critic_follows_the_actor_where_it_is_not_told_otherwise(tiny_config):
    config = tiny_config()
    assert config.critic_mini_batch_size == config.actor.ppo_mini_batch_size == 16
    assert (config.critic_epochs, config.critic_optimizer_steps) == (1, 2 * 2)
    own = tiny_config({"critic": {"ppo_mini_batch_size": 8, "ppo_epochs": 3}, "trainer": {"critic_warmup": 1}})
    assert (own.critic_optimizer_steps, own.optimizer_steps) == (2 * 3 * 4, 1 * 1 * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic": {"ppo_mini_batch_size": 5}}, "critic.ppo_mini_batch_size=5 must divide the 32 completions"),
        (
            {"critic": {"ppo_max_token_len_per_gpu": 20}},
            "critic.ppo_max_token_len_per_gpu=20 is less than one sequence",
        ),
        ({"critic": {"vf_coef": 0.1, "optim": {"clip_grad": 0}}}, "would change nothing"),
        ({"critic": {"cliprange_value": 0}}, "cliprange_value"),
        ({"trainer": {"critic_warmup": 2}}, "leaves the actor none of the trainer.total_steps=2 steps"),
        ({"reward": {"functions": []}}, "nothing gives a reward"),
        ({"rollout": {"dynamic_sampling_rounds": 1}, "reward_model": {"path": "m"}}, "before the reward model scores"),
        ({"reward_model": {"max_length": 20000}}, "reward_model.max_token_len_per_gpu=16384 is less than one sequence"),
    ],
)
def test_what_does_not_fit_together_is_refused(tiny_config, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config({"critic": {}, "reward_model": {}} | changes)


def test_a_reward_model_alone_is_a_reward(tiny_config):
    assert tiny_config({"reward": {"functions": []}, "reward_model": {"path": "m"}}).reward_model.weight == 1.0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grpo", {"trainer": {"critic_warmup": 1}}, "algorithm.name=grpo has no critic"),
        ("online_dpo", {"rollout": {"n": 2}, "actor": {"ppo_mini_batch_size": 1}}, "must be a multiple of rollout.n=2"),
        (
            "online_dpo",
            {"rollout": {"n": 2}, "trainer": {"n_gpus_per_node": 2}, "actor": {"ppo_mini_batch_size": 2}},
            "at least one prompt for each of the 2 data-parallel ranks",
        ),
        (
            "online_dpo",
            {"rollout": {"n": 2}, "actor": {"ppo_max_token_len_per_gpu": 40}},
            "less than the 2 completions of a prompt can hold .48 tokens.",
        ),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(tiny_config, name, changes, message):
    config = with_algorithm(tiny_config, changes, name=name)
    with pytest.raises(ValueError, match=message):
        check(config, algorithms.get(name).needs(config.algorithm))


def test_group_sizes_are_checked_with_the_rest(tiny_config):
    with pytest.raises(ValueError, match="rollout.n=1 .rloo_k. leaves no other completion"):
        tiny_config({"rollout": {"n": 1}, "algorithm": algorithms.get("rloo").Config()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_token_len_per_gpu": 100}, "less than one pair can hold"),
        ({"trainer": PREFERENCES["trainer"] | {"n_gpus_per_node": 8}}, "data.train_batch_size=4 examples leave some"),
    ],
)
def test_preferences(changes, message):
    assert RewardModelTrainConfig.model_validate(PREFERENCES).world_size == 2
    with pytest.raises(ValueError, match=message):
        RewardModelTrainConfig.model_validate(PREFERENCES | changes)


def test_settings_of_models_that_are_not_loaded_are_named(tiny_config):
    changes = {"critic": {"ppo_epochs": 2, "cliprange_value": 0.2}, "ref": {"model_path": "r"}}
    config, needs = with_algorithm(tiny_config, changes, name="grpo"), algorithms.get("grpo").needs
    critic, reference = without_effect(config, needs(config.algorithm))
    assert critic.startswith("critic.cliprange_value, critic.ppo_epochs: without effect, algorithm.name=grpo has no")
    assert reference.startswith("ref.model_path=r: without effect")
    assert without_effect(with_algorithm(tiny_config, {"critic": {}}, name="grpo"), needs(config.algorithm)) == []
    ppo = with_algorithm(tiny_config, changes, name="ppo", use_kl_in_reward=True)
    assert without_effect(ppo, algorithms.get("ppo").needs(ppo.algorithm)) == []
