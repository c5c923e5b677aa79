import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.config.explain import dump, explain
from megarl.config.load import load
from megarl.config.root import SFTConfig, TrainConfig
from megarl.config.schema import schema

from .test_load import Toy, algorithm_config


class Other(Toy):
    clip_ratio_low: float = 0.1


def train_config(**trainer):
    return TrainConfig.model_validate(
        {
            "trainer": {"output_dir": "x", "total_steps": 2, **trainer},
            "data": {"train_files": ["a.jsonl", {"path": "b.jsonl", "weight": 0.25}], "train_batch_size": 4},
            "actor": {"model": {"path": "m"}, "ppo_mini_batch_size": 8, "optim": {"lr": 1e-7}},
            "reward": {"functions": "arithmetic"},
            "algorithm": Toy(clip_ratio_high=0.28),
        }
    )


TEXTS = st.one_of(
    st.sampled_from(["1e-3", "001", "null", "on", "a: b", "- a", "é", "~", "1.", "#x", "=", "2024-01-01"]), st.text()
)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 2**40))
@example(text="a line\x85break", seed=0)
def test_a_dumped_config_loads_back_equal(tmp_path_factory, text, seed):
    config = train_config(project_name=text, experiment_name=text or None, seed=seed)
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump(config), newline="")
    notices = []
    assert load(TrainConfig, [file], [], algorithm_config, notices.append) == config
    assert notices == []


def test_an_sft_config_loads_back_equal(tmp_path):
    config = SFTConfig.model_validate(
        {
            "trainer": {"output_dir": "x", "total_steps": 2},
            "model": {"path": "m"},
            "data": {"train_files": "a.jsonl", "train_batch_size": 4},
        }
    )
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(SFTConfig, [tmp_path / "config.yaml"], [], algorithm_config) == config


def test_a_key():
    text = explain("rollout.n", TrainConfig, {"toy": Toy})
    assert text.splitlines()[0] == "rollout.n"
    for part in ("Completions per prompt", "type: whole number", "default: 8", "allowed: more than 0"):
        assert part in text
    assert "also read from: num_generation, num_generations" in text
    assert "type: one of float32, bfloat16" in explain("actor.model.dtype", TrainConfig, {})
    assert "default: none, required" in explain("actor.model.path", TrainConfig, {})


def test_a_list_of_sections_tells_what_each_item_holds():
    assert "each: weight: Share of this file" in explain("data.train_files", TrainConfig, {})


def test_a_section_lists_its_keys():
    text = explain("rollout.val_kwargs", TrainConfig, {"toy": Toy})
    assert [line.split()[0].strip(":") for line in text.splitlines()[1:]] == [
        "rollout.val_kwargs.n",
        "rollout.val_kwargs.temperature",
        "rollout.val_kwargs.max_prompts",
    ]
    assert [line.split(":")[0].strip() for line in explain("", TrainConfig, {}).splitlines()[1:]] == list(
        TrainConfig.model_fields
    )


def test_another_spelling():
    assert explain("learning_rate", TrainConfig, {}).startswith("learning_rate is another spelling of actor.optim.lr.")
    text = explain("actor.clip_ratio", TrainConfig, {"toy": Toy})
    assert "algorithm.clip_ratio_low\n  Low." in text and "algorithm.clip_ratio_high\n  High." in text


def test_an_algorithms_keys_are_told_per_algorithm():
    text = explain("algorithm.clip_ratio_low", TrainConfig, {"toy": Toy, "other": Other})
    assert (
        text.index("With algorithm.name=toy:") < text.index("default: 0.2") < text.index("With algorithm.name=other:")
    )
    assert text.index("With algorithm.name=other:") < text.index("default: 0.1")


def test_the_algorithms_name_lists_the_known_ones():
    text = explain("algorithm.adv_estimator", TrainConfig, {"toy": Toy, "other": Other})
    assert text.startswith("algorithm.name\n") and text.endswith("allowed: toy, other")


def test_an_unknown_key_gives_near_names():
    with pytest.raises(ValueError, match="there is no key rolout.n; did you mean rollout.n"):
        explain("rolout.n", TrainConfig, {"toy": Toy})
    with pytest.raises(ValueError, match="the sections are trainer, parallel"):
        explain("xyzzy", TrainConfig, {})


@pytest.mark.parametrize("root", [TrainConfig, SFTConfig])
def test_every_key_has_a_description(root):
    for name, field in schema(root).items():
        assert field.description, name
        assert explain(name, root, {})
