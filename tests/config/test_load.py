import textwrap
from pathlib import Path
from typing import Literal

import pytest

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import Section, key
from megarl.config.load import load
from megarl.config.root import SFTConfig, TrainConfig

BASE = """
    trainer: {output_dir: runs/x, total_steps: 3}
    data: {train_files: a.jsonl, train_batch_size: 4}
    actor:
      model: {path: m}
      ppo_mini_batch_size: 8
    reward: {functions: arithmetic}
    algorithm: {name: toy}
"""


class Inner(Section):
    horizon: int = key(100, "A nested key.", gt=0)


class Toy(AlgorithmConfig):
    name: Literal["toy"] = key("toy", "A toy.")
    clip_ratio_low: float = key(0.2, "Low.", ge=0)
    clip_ratio_high: float = key(0.2, "High.", ge=0)
    use_kl_loss: bool = key(False, "KL in the loss.")
    inner: Inner = key(Inner(), "Nested.")


def algorithm_config(name):
    if name != "toy":
        raise ValueError(f"algorithm.name={name} is unknown; known: toy")
    return Toy


@pytest.fixture
def train(tmp_path):
    """train("rollout.n=4", site="rollout: {n: 2}") -> configuration; .notices holds what was notified."""
    notices = []

    def run(*overrides, base=BASE, **layers):
        files = []
        for name, text in {"base": base, **layers}.items():
            files.append(tmp_path / f"{name}.yaml")
            files[-1].write_text(textwrap.dedent(text))
        notices.clear()
        return load(TrainConfig, files, list(overrides), algorithm_config, notices.append)

    run.notices = notices
    return run


def lines(train, *overrides, **layers):
    with pytest.raises(ValueError) as error:
        train(*overrides, **layers)
    return str(error.value).splitlines()


def test_layers_merge_from_left_to_right_and_overrides_win(train):
    config = train(
        "rollout.n=6",
        "actor.optim.betas=[0.9, 0.99]",
        "trainer.logger=[jsonl]",
        site="rollout: {n: 2, temperature: 0.5}\nactor: {optim: {lr: 1e-3, eps: 1e-6}}",
        more="actor.optim.lr: 2e-3\nref:\n",
    )
    assert (config.rollout.n, config.rollout.temperature) == (6, 0.5)
    assert (config.actor.optim.lr, config.actor.optim.eps, config.actor.optim.betas) == (2e-3, 1e-6, (0.9, 0.99))
    assert config.trainer.logger == ["jsonl"]
    assert config.actor.model.path == "m"
    assert train.notices == []


def test_algorithm_name_picks_the_section(train):
    config = train("algorithm.clip_ratio_high=0.28", "algorithm.inner.horizon=7")
    assert type(config.algorithm) is Toy
    assert (config.algorithm.clip_ratio_high, config.algorithm.inner.horizon) == (0.28, 7)
    assert lines(train, "algorithm.name=tay") == ["command line: algorithm.name=tay is unknown; known: toy"]
    no_name = BASE.replace("algorithm: {name: toy}", "algorithm: {clip_ratio_low: 0.1}")
    assert lines(train, base=no_name) == ["algorithm.name is missing: A file of megarl/algorithms by its name."]


def test_files_and_their_parts_replace_each_other(train):
    config = train("data.train_files.weight=2", site="data: {train_files: {path: b.jsonl}}")
    assert [(f.path, f.weight) for f in config.data.train_files] == [("b.jsonl", 2.0)]
    config = train(
        "data.train_files=[c.jsonl, {path: d.jsonl, weight: 3}]", site="data: {train_files: {path: b.jsonl}}"
    )
    assert [(f.path, f.weight) for f in config.data.train_files] == [("c.jsonl", 1.0), ("d.jsonl", 3.0)]


def test_every_problem_has_its_line_with_place_key_value_and_remedy(train, tmp_path):
    told = lines(train, "rollout.n=0", "actor.lr=1", "trainer.logger=[consol]", site="rollout: {temprature: 0.5}")
    assert sorted(told) == sorted(
        [
            "command line: actor.lr=1: there is no such key; did you mean actor.optim.lr or critic.optim.lr?",
            "command line: rollout.n=0: must be greater than 0",
            "command line: trainer.logger=[consol], at [0]: must be one of console, jsonl, tensorboard, wandb",
            f"{tmp_path / 'site.yaml'}: rollout.temprature=0.5: there is no such key; did you mean rollout.temperature "
            "or rollout.val_kwargs.temperature?",
        ]
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.n=x", "rollout.n=x: must be a whole number"),
        ("rollout.n=2.5", "rollout.n=2.5: must be a whole number"),
        ("rollout.temperature=hot", "rollout.temperature=hot: must be a number"),
        ("data.shuffle=perhaps", "data.shuffle=perhaps: must be true or false"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization=1.5: must be at most 1"),
        ("trainer.test_freq=-1", "trainer.test_freq=-1: must be at least 0"),
        ("trainer.project_name=12", "trainer.project_name=12: must be a text; put it in quotes"),
        ("trainer.total_steps=null", "trainer.total_steps=null: must be a whole number"),
        ("rollout.dtype=float16", "rollout.dtype=float16: must be one of float32, bfloat16"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9], at [1]: a value is missing"),
        ("data.train_files=[]", "data.train_files=[]: must have at least 1 item(s)"),
        ("data.train_files.weight=-1", "data.train_files.weight=-1: must be greater than 0"),
        ("algorithm.clip_ratio_low=-1", "algorithm.clip_ratio_low=-1: must be at least 0"),
        ("algorithm.inner.horizon=0", "algorithm.inner.horizon=0: must be greater than 0"),
        ("learning_rate=-1", "actor.optim.lr=-1 (written learning_rate): must be greater than 0"),
        ("ref=3", "ref=3: ref is a section with the keys model_path"),
        (
            "data.train_files=[{path: x, wieght: 2}]",
            "data.train_files=[{path: x, wieght: 2}], at [0].wieght: there is no such key; known: path, weight",
        ),
        (
            "num_generatoins=4",
            "num_generatoins=4: there is no such key; "
            "did you mean rollout.n (num_generations) or actor.ppo_epochs (num_iterations)?",
        ),
        ("xyzzy=4", "xyzzy=4: there is no such key; no key has a similar name"),
    ],
)
def test_what_is_allowed_is_told_in_plain_words(train, override, line):
    extra = ["data.train_files.path=a.jsonl"] if override.startswith("data.train_files.") else []
    assert lines(train, *extra, override) == [f"command line: {line}"]


def test_missing_keys_are_named_to_the_leaf_with_their_description(train):
    told = lines(train, base="trainer: {total_steps: 3}\ndata: {train_files: a.jsonl}\nalgorithm: {name: toy}\n")
    assert [line.split(" is missing: ")[0] for line in told] == [
        "trainer.output_dir",
        "data.train_batch_size",
        "actor.model.path",
        "actor.ppo_mini_batch_size",
    ]
    assert told[1].endswith("Prompts per step; completions per step are this times rollout.n.")


def test_rules_between_keys_are_told_without_jargon(train):
    assert lines(train, "actor.optim.betas=[2, 3]") == ["actor.optim: betas (2.0, 3.0) must both lie in [0, 1)"]
    (line,) = lines(train, "actor.ppo_mini_batch_size=7")
    assert line.startswith("actor.ppo_mini_batch_size=7 must divide the 32 completions of a step")
    (line,) = lines(train, "actor.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=8")
    assert line.startswith("actor.ppo_mini_batch_size=4 completions leave some of the 8 data-parallel ranks without")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [2\n", "base.yaml line 3"),
        ("rollout:\n  n: 1\n  n: 2\n", "base.yaml line 3: the key n comes twice"),
        ("a: b: c\n", "base.yaml line 1: mapping values are not allowed here"),
        ("- a\n", "base.yaml must hold `key: value` lines, not a list"),
    ],
)
def test_yaml_errors_have_a_line(train, text, message):
    (line,) = lines(train, base=text)
    assert message in line


def test_a_missing_file_and_a_malformed_override(train):
    with pytest.raises(ValueError, match=r"/no/such.yaml does not exist"):
        load(TrainConfig, [Path("/no/such.yaml")], [], algorithm_config)
    assert lines(train, "rollout.n") == ["command line: 'rollout.n' is not key=value, such as rollout.n=8"]
    (line,) = lines(train, "rollout.n=[1")
    assert line.startswith("command line: 'rollout.n=[1' line 1: ")


def test_other_spellings_are_read_and_told(train, tmp_path):
    config = train(
        "max_new_tokens=9", site="actor_rollout_ref: {model: {path: q}, rollout: {n: 2}}\nlearning_rate: 1e-4"
    )
    assert (config.actor.model.path, config.rollout.n) == ("q", 2)
    assert (config.actor.optim.lr, config.data.max_response_length) == (1e-4, 9)
    site = tmp_path / "site.yaml"
    assert train.notices == [
        f"{site}: actor_rollout_ref.model.path is read as actor.model.path",
        f"{site}: actor_rollout_ref.rollout.n is read as rollout.n",
        f"{site}: learning_rate is read as actor.optim.lr",
        "command line: max_new_tokens is read as data.max_response_length",
    ]


def test_verl_mini_batch_counts_prompts(train):
    config = train("actor_rollout_ref.actor.ppo_mini_batch_size=2", "rollout.n=3")
    assert config.actor.ppo_mini_batch_size == 6
    assert train.notices[-1].endswith("actor.ppo_mini_batch_size counts completions: 2 x 3 (rollout.n) = 6")
    assert train("actor_rollout_ref.critic.ppo_mini_batch_size=2", "rollout.n=4").critic.ppo_mini_batch_size == 8
    # n of a later layer counts, and so does the default; megarl's own spelling in a later layer counts completions
    assert train(site="actor_rollout_ref.actor.ppo_mini_batch_size: 2").actor.ppo_mini_batch_size == 16
    own = train("actor.ppo_mini_batch_size=2", site="actor_rollout_ref.actor.ppo_mini_batch_size: 2")
    assert own.actor.ppo_mini_batch_size == 2
    assert lines(train, "actor_rollout_ref.actor.ppo_mini_batch_size=x")[0].startswith(
        "command line: actor.ppo_mini_batch_size=x (written actor_rollout_ref.actor.ppo_mini_batch_size)"
    )


@pytest.mark.parametrize("order", [1, -1])
def test_an_alias_of_two_keys_leaves_what_is_set_by_itself(train, order):
    config = train(*["actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4"][::order])
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (0.3, 0.4)


def test_two_spellings_that_disagree_are_refused(train):
    (line,) = lines(train, "num_generations=4", "rollout.n=2")
    assert line == "command line: rollout.n=2 and num_generations=4 are the same key, rollout.n; keep one of them"
    assert train("num_generations=4", "rollout.n=4").rollout.n == 4
    assert train("rollout.n=2", site="num_generations: 4").rollout.n == 2


def test_supervised_training_has_no_algorithm(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(
        "trainer: {output_dir: x, total_steps: 2}\nmodel.path: m\ndata: {train_files: a.jsonl, train_batch_size: 2}\n"
    )
    config = load(SFTConfig, [file], ["learning_rate=3e-3"], algorithm_config, lambda line: None)
    assert (config.optim.lr, config.model.path) == (3e-3, "m")
