"""The whole loop on real parts: task, warm start, GRPO with an engine, and the same losses in every layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megarl.data.arithmetic import make_arithmetic_task

CONFIGS = Path(__file__).parents[1] / "configs"
STEPS = 3
ALL_LOGITS_AT_ONCE = ["actor.fused_linear_loss=off"]


def megarl(*arguments, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python -m megarl ...`, as a user types it."""
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[float, float]]:
    return [(m["loss/policy_avg"], m["policy/grad_norm"]) for m in metrics_of(run_dir) if "loss/policy_avg" in m]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_arithmetic_task(tmp_path_factory.mktemp("task"), seed=0)


@pytest.fixture(scope="module")
def warm(task, tmp_path_factory) -> Path:
    """A short warm start under data parallelism: enough for answers of the right form, not for right answers."""
    run_dir = tmp_path_factory.mktemp("sft")
    done = megarl(
        *("sft", CONFIGS / "quickstart_sft.yaml", f"trainer.output_dir={run_dir}", "trainer.total_steps=40"),
        *(
            f"model.path={task}/model",
            f"data.train_files={task}/sft_train.jsonl",
            f"data.val_files={task}/sft_val.jsonl",
        ),
        *("parallel.tensor_model_parallel_size=1", "trainer.test_freq=40", "data.train_batch_size=64"),
    )
    assert done.returncode == 0, done.stderr
    return run_dir


def overrides(task: Path, warm: Path, run_dir: Path) -> list[str]:
    return [
        f"trainer.output_dir={run_dir}",
        f"trainer.total_steps={STEPS}",
        "trainer.sample_table_freq=2",
        f"actor.model.path={warm}/model",
        f"data.train_files={task}/train.jsonl",
        f"data.val_files={task}/heldout.jsonl",
        "rollout.val_kwargs.max_prompts=64",
        "rollout.kv_cache_memory_mib=64",
    ]


@pytest.fixture(scope="module")
def recorded(task, warm, tmp_path_factory) -> tuple[Path, Path, subprocess.CompletedProcess]:
    """The quickstart's own configuration with its engine, three steps, recording its rollouts."""
    run_dir, record_dir = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("record")
    done = megarl(
        *("train", CONFIGS / "quickstart.yaml", *overrides(task, warm, run_dir), f"rollout.record_dir={record_dir}"),
        *("trainer.test_freq=3", "trainer.logger=[console,jsonl,tensorboard]"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, record_dir, done


def test_warm_start_learns_and_is_a_checkpoint(warm):
    found = [m["loss"] for m in metrics_of(warm) if "loss" in m]
    assert len(found) == 40
    assert found[-1] < 0.6 * found[0]
    assert AutoModelForCausalLM.from_pretrained(warm / "model").num_parameters() == 509_056


def test_a_run_leaves_what_it_promises(recorded):
    run_dir, _, done = recorded
    summary = json.loads((run_dir / "summary.json").read_text())
    names = [f"heldout_{kind}_{when}" for kind in ("sampled", "greedy") for when in ("before", "after")]
    for name in [*names, "train_reward_first", "train_reward_last", "parity_max_abs_logprob"]:
        assert isinstance(summary[name], float), name
    assert summary["steps"] == STEPS
    assert summary["parity_max_abs_logprob"] <= 1e-4
    phases = summary["seconds_per_step"]
    assert {"generate", "logprobs", "update", "sync", "total"} <= phases.keys()
    assert phases["total"] == pytest.approx(sum(v for k, v in phases.items() if k != "total"), abs=2e-3)
    for name in ("reward.png", "config.yaml", "samples.jsonl", "logs/engine_0.log", "logs/driver.log"):
        assert (run_dir / name).stat().st_size > 0 or name.startswith("logs/"), name
    assert list((run_dir / "tensorboard").iterdir())
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["total_steps"] == STEPS
    assert "sample completions" in done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


def test_the_policy_moved_and_was_saved(recorded, warm):
    before, after = (
        AutoModelForCausalLM.from_pretrained(d / "model", dtype=torch.float32) for d in (warm, recorded[0])
    )
    moved = [(a - b).abs().max() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert all(m > 0 for m in moved)
    assert max(moved) < 0.02  # six Adam steps of at most 1e-3


def test_every_completion_carries_the_version_that_sampled_it(recorded):
    from megarl.rollout.replay import load

    for step in range(1, STEPS + 1):
        versions = {v for r in load(recorded[1], step) for c in r.completions for v in c.weight_version.tolist()}
        assert versions == {step - 1}


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"],
        ["parallel.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=2"],
        ["parallel.sequence_parallel=true", "actor.ppo_max_token_len_per_gpu=1024"],
        ALL_LOGITS_AT_ONCE,
    ],
    ids=["one-rank", "data-parallel-2", "sequence-parallel-small-micro-batches", "all-logits-at-once"],
)
def test_the_same_rollouts_give_the_same_losses_in_another_way(recorded, task, warm, tmp_path, layout):
    run_dir, record_dir, _ = recorded
    done = megarl(
        *("train", CONFIGS / "quickstart.yaml", *overrides(task, warm, tmp_path), f"rollout.replay_dir={record_dir}"),
        *("trainer.test_freq=0", *layout),
    )
    assert done.returncode == 0, done.stderr
    expected, found = losses(run_dir), losses(tmp_path)
    assert len(found) == len(expected) == STEPS
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert abs(loss - expected_loss) <= (1e-5 if layout == ALL_LOGITS_AT_ONCE else 1e-4)
        assert abs(norm - expected_norm) <= 1e-4 * max(1.0, expected_norm)


def test_the_reference_is_the_initial_policy_and_stays_it(recorded, task, warm, tmp_path):
    """With one mini-batch per step the KL is that of the policy before the update: 0 at first, more after a step."""
    done = megarl(
        *("train", CONFIGS / "quickstart.yaml", *overrides(task, warm, tmp_path), f"rollout.replay_dir={recorded[1]}"),
        *("trainer.test_freq=0", "trainer.total_steps=2", "actor.ppo_mini_batch_size=512"),
        *("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.01", "trainer.logger=jsonl"),
        *("actor.optim.lr_warmup_steps=0", "actor.optim.min_lr_ratio=0"),
    )
    assert done.returncode == 0, done.stderr
    assert [m["lr"] for m in metrics_of(tmp_path)] == pytest.approx([2e-3 / 3, 1e-3 / 3])  # the last step still moves
    assert [m["rollout/max_staleness"] for m in metrics_of(tmp_path)] == [0.0, 0.0]
    first, second = (m["policy/kl_avg"] for m in metrics_of(tmp_path))
    assert abs(first) <= 1e-7
    assert second > 1e-5
