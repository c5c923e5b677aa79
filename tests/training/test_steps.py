"""Two replayed steps of every algorithm through the whole trainer: models, estimates, updates, metrics; no engine."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl import algorithms
from megarl.config.root import TrainConfig
from megarl.data.arithmetic import build_tokenizer
from megarl.rollout import replay
from megarl.types import Completion, Prompt, Rollout
from tests import tiny_models
from tests.parallel_utils import run_ranks

STEPS, PROMPTS = 2, 4
KL_IN_REWARD = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05}}
# One run of each algorithm, and of what changes which models run.
RUNS = {
    **{name: {} for name in algorithms.names()},
    "dr_grpo": {"loss_scale_factor": 8.0},
    "ppo pf": {"use_pf_ppo": True, **KL_IN_REWARD},
    "ppo full": {"use_kl_in_reward": True, "kl_penalty": "full"},
    "remax learned": {},
    "grpo full": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1},
}


def rollouts(n: int, step: int) -> list[Rollout]:
    """Random completions of one token to 8, and their scores; a baseline for each prompt."""
    draw = np.random.default_rng(17 * step + n)

    def completion() -> Completion:
        length = int(draw.integers(1, 9))
        ids = draw.integers(6, 100, length).astype(np.int32)
        versions = np.full(length, step - 1, np.int32)
        return Completion(ids, -draw.random(length).astype(np.float32), "stop", np.ones(length, np.uint8), versions)

    def group(prompt: Prompt, size: int) -> Rollout:
        scores = draw.integers(0, 3, size).astype(np.float64)
        return Rollout(prompt, [completion() for _ in range(size)], scores, {"exact_match": scores}, ["12"] * size)

    prompts = [
        Prompt(i, draw.integers(6, 100, int(draw.integers(2, 7))).astype(np.int32), "1+1=") for i in range(PROMPTS)
    ]
    return [replace(group(prompt, n), baseline=group(prompt, 1)) for prompt in prompts]


def _train(config) -> None:
    from megarl import trainer

    keep, trainer.layouts.shutdown = trainer.layouts.shutdown, lambda: None  # the ranks go on to the next algorithm
    try:
        trainer.train(config, quiet=True)
    finally:
        trainer.layouts.shutdown = keep


def _train_all(configs: dict) -> None:
    for settings in configs.values():
        algorithm = algorithms.get(settings["algorithm"]["name"]).Config.model_validate(settings["algorithm"])
        _train(TrainConfig.model_validate(settings | {"algorithm": algorithm}))


@pytest.fixture(scope="module")
def classifier(tiny_checkpoint, tmp_path_factory) -> Path:
    """A reward model of another vocabulary size and family than the policy, with its own tokenizer."""
    folder = tmp_path_factory.mktemp("classifier")
    build_tokenizer().save_pretrained(folder)
    torch.manual_seed(4)
    config = tiny_models.CONFIGS["qwen3-tied"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_dirs(tiny_config, classifier, tmp_path_factory) -> dict[str, Path]:
    """Every run's folder: two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("algorithms")
    for n in (2, 4):
        for step in range(1, STEPS + 1):
            replay.record(root / f"n{n}", step, rollouts(n, step))
    configs = {}
    for label, keys in RUNS.items():
        name = label.split()[0]
        n = 2 if name == "online_dpo" else 4
        configs[label] = tiny_config(
            {
                "trainer": {
                    "output_dir": str(root / label),
                    "total_steps": STEPS,
                    "n_gpus_per_node": 2,
                    "test_freq": 0,
                },
                "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": name in ("ppo", "grpo")},
                "data": {"train_batch_size": PROMPTS},
                "actor": {"ppo_mini_batch_size": 8 if n == 4 else 4, "optim": {"lr": 1e-3}},
                "critic": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}, "ppo_epochs": 2},
                "rollout": {"n": n, "replay_dir": str(root / f"n{n}")},
                "algorithm": {"name": name},
                "reward_model": {"path": str(classifier), "weight": 0.5, "max_length": 32}
                if "learned" in label
                else {},
            }
        ).model_dump(mode="json") | {"algorithm": {"name": name, **keys}}
    run_ranks(_train_all, 2, configs, timeout_seconds=400)
    return {label: root / label for label in RUNS}


@pytest.fixture(params=RUNS)
def run(request, run_dirs) -> tuple[str, Path, list[dict]]:
    folder = run_dirs[request.param]
    return request.param, folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_are_finite_and_move_the_policy(run, tiny_checkpoint):
    _, folder, metrics = run
    assert len(metrics) == STEPS
    assert not any("not_finite" in m for m in metrics)
    assert all(m["policy/grad_norm"] > 0 and math.isfinite(m["loss/policy_avg"]) for m in metrics)
    before, after = (load_file(f / "model.safetensors") for f in (tiny_checkpoint(), folder / "model"))
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() > 0 for name in before)


def test_metrics_fit_together(run):
    label, _, metrics = run
    for m in metrics:
        assert m["objective/rlhf_reward"] == pytest.approx(m["objective/scores"] + m["objective/non_score_reward"])
        if not label.startswith("online_dpo"):
            assert m["val/ratio_var"] >= -1e-9 and "val/ratio_spread" not in m
        assert {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"} <= m.keys()
    if "full" in label or label in ("ppo pf", "online_dpo"):
        assert abs(metrics[0]["objective/kl"]) <= 1e-4 < abs(metrics[1]["objective/kl"])
    else:
        assert "objective/kl" not in metrics[0]


def test_only_ppo_has_a_critic_and_it_learns(run):
    label, folder, metrics = run
    if not label.startswith("ppo"):
        assert "loss/value_avg" not in metrics[0]
        return
    assert all(m["critic/grad_norm"] > 0 and m["loss/value_avg"] >= 0 for m in metrics)
    head = load_file(folder / "model_critic" / "model.safetensors")["score.weight"]
    assert head.shape == (1, 128) and head.abs().max() > 1e-3  # it began as zeros


def test_memory_of_the_models_is_ordered_as_their_number(run_dirs):
    """PPO keeps a critic, OnlineDPO a reference, GRPO without KL neither. (Peak: sums of their tensors, on rank 0.)"""
    found = {label: json.loads((run_dirs[label] / "summary.json").read_text()) for label in RUNS}
    peaks = {label: summary["peak_model_state_mib"] for label, summary in found.items()}
    assert peaks["ppo"] > peaks["online_dpo"] > peaks["grpo"]
    parts = {label: found[label]["model_state_mib"] for label in ("ppo", "grpo")}
    weights = parts["grpo"]["weights"]
    assert parts["grpo"]["gradients"] == pytest.approx(weights, rel=0.02)  # fp32 of fp32, padded buffers
    assert parts["grpo"]["optimizer"] == pytest.approx(2 * weights, rel=0.02)  # two moments; masters are the weights
    assert parts["ppo"]["weights"] > 1.8 * weights
    assert parts["grpo"]["activations"] > 0


def test_the_exact_kl_is_charged_and_learnt_from(run_dirs):
    def second(label):
        return json.loads((run_dirs[label] / "metrics.jsonl").read_text().splitlines()[1])

    assert second("grpo full")["policy/kl_avg"] > 1e-6
    assert second("grpo full")["loss/policy_avg"] != second("grpo")["loss/policy_avg"]
    assert second("ppo full")["objective/kl_per_token"] > 1e-6
    assert second("ppo pf")["objective/kl_coef"] != 0.05  # the adaptive controller has moved


def test_pairs_are_whole(run_dirs):
    (first, second) = map(json.loads, (run_dirs["online_dpo"] / "metrics.jsonl").read_text().splitlines())
    assert abs(first["loss/policy_avg"] - math.log(2)) < 0.1  # near the reference, sigmoid(0) is one half
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen", "objective/scores_margin", "beta"} <= first.keys()
    assert first["beta"] == pytest.approx(0.1)


def test_a_learned_reward_is_added_with_its_weight(run_dirs, classifier):
    """Every completion of these rollouts has the same text: one score, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "12"}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits.item()
    learned, rules = (
        [json.loads(line) for line in (run_dirs[label] / "metrics.jsonl").read_text().splitlines()]
        for label in ("remax learned", "remax")
    )
    for with_model, without in zip(learned, rules, strict=True):
        assert with_model["reward/reward_model"] == pytest.approx(expected, abs=1e-4)
        scores = without["objective/scores"] + 0.5 * expected
        assert with_model["objective/scores"] == pytest.approx(scores, abs=1e-4)
    # The greedy baseline has the same text, so the same score: the advantages are the rules' alone.
    assert learned[0]["policy/grad_norm"] == pytest.approx(rules[0]["policy/grad_norm"], rel=1e-4)


def test_draws_and_coefficients_continue_where_they_stood(tiny_config, run_dirs):
    """From the state that a run has left, and from that of a course that has gone one step on."""
    from megarl.training.course import Course

    algorithm = algorithms.get("ppo")
    config = tiny_config().model_copy(update={"algorithm": algorithm.Config(**RUNS["ppo pf"])})
    one, other = Course(algorithm, config, 12), Course(algorithm, config, 12)
    one.restore(json.loads((run_dirs["ppo pf"] / "model_course.json").read_text()))
    assert one.state()["kl"]["value"] != 0.05  # the run's adaptive controller has moved
    one.chosen(rollouts(4, 1))
    other.restore(json.loads(json.dumps(one.state())))
    drawn = [[r.scores.tolist() for r in course.chosen(rollouts(4, 2))] for course in (one, other)]
    assert drawn[0] == drawn[1]
    assert other.state() == one.state()
