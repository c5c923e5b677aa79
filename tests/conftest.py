"""Tiny checkpoints and one engine for the whole session."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from megarl.config.root import TrainConfig

# Runs inside a reward worker: the only place from which a test can look at that process's modules.
SPY_REWARD = """
import pathlib, sys

def spy(completions, prompts, ground_truth, finish_reason, data_source, **columns):
    if (pathlib.Path(__file__).parent / "fail").exists():
        raise OSError("asked to")
    assert len(completions) == len(prompts) == len(ground_truth) == len(finish_reason) == len(columns["level"])
    megatron = float(any(name.split(".")[0] == "megatron" for name in sys.modules))
    return [{"score": float(len(text)), "megatron": megatron} for text in completions]
"""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """tiny_checkpoint("qwen2-tied" or "qwen2-untied") -> folder: 2 layers, hidden 128, fp32, 128 tokens."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen2-untied") -> Path:
        if kind not in made:
            made[kind] = _save_checkpoint(
                tmp_path_factory.mktemp(kind), tied={"qwen2-tied": True, "qwen2-untied": False}[kind]
            )
        return made[kind]

    return make


@pytest.fixture(scope="session")
def tiny_config(tiny_checkpoint, tmp_path_factory):
    """tiny_config({"rollout": {"n": 4}}) -> TrainConfig over the tiny checkpoint and a file of 12 sums."""
    folder = tmp_path_factory.mktemp("tiny_data")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{a + 1}="}],
            "data_source": "sums",
            "reward_model": {"ground_truth": str(2 * a + 1)},
            "level": a,
        }
        for a in range(12)
    ]
    data, spy = folder / "sums.jsonl", folder / "spy.py"
    data.write_text("\n".join(map(json.dumps, rows)))
    spy.write_text(SPY_REWARD)

    def make(changes: dict | None = None) -> TrainConfig:
        sections = {
            "trainer": {"output_dir": str(folder / "run"), "total_steps": 2},
            "data": {
                "train_files": str(data),
                "val_files": str(data),
                "train_batch_size": 8,
                "max_prompt_length": 16,
                "max_response_length": 8,
            },
            "actor": {"model": {"path": str(tiny_checkpoint()), "dtype": "float32"}, "ppo_mini_batch_size": 16},
            "rollout": {
                "n": 4,
                "kv_cache_memory_mib": 32,
                "max_num_seqs": 64,
                "val_kwargs": {"n": 2, "max_prompts": 5},
            },
            "reward": {"functions": [{"name": f"{spy}:spy", "weight": 0.5}, "exact_match"]},
            "algorithm": {"name": "grpo"},
        }
        for section, values in (changes or {}).items():
            sections[section] = sections.get(section, {}) | values if isinstance(values, dict) else values
        return TrainConfig.model_validate(sections)

    return make


@pytest.fixture(scope="session")
def engine_socket_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="session")
def record_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture
def spy_fails(tiny_config):
    """A context in which the reward function of `tiny_config` raises."""

    @contextmanager
    def context():
        flag = Path(tiny_config().reward.functions[0].name.rpartition(":")[0]).parent / "fail"
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()

    return context()


@pytest.fixture(scope="session")
def driver(tiny_config, engine_socket_dir, record_dir, tmp_path_factory):
    """A ready rollout driver with one engine of the tiny untied checkpoint, at its initial weights."""
    from megarl.rollout.handle import RolloutDriver

    config = tiny_config({"rollout": {"socket_dir": str(engine_socket_dir), "record_dir": str(record_dir)}})
    lines: list[str] = []
    with RolloutDriver.start(config, tmp_path_factory.mktemp("driver_run")) as driver:
        driver.wait_until_ready(lines.append)
        driver.progress_lines = lines
        yield driver


def _save_checkpoint(folder: Path, tied: bool) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from megarl.data.arithmetic import build_tokenizer

    build_tokenizer().save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=128,  # heads of 32: the smallest that vLLM's CPU attention takes
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder
