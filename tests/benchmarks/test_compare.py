"""What the comparison refuses to call a success."""

import importlib.util
from pathlib import Path

import pytest

from megarl import algorithms
from megarl.config.load import load
from megarl.config.root import RewardModelTrainConfig, TrainConfig
from megarl.training.check import check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(after: float = 0.9, memory: float = 1.0) -> dict:
    parts = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), memory / 4)
    return {
        "heldout_sampled_before": 0.3,
        "heldout_sampled_after": after,
        "steps": 5,
        "seconds": 1.0,
        "peak_rss_mib": 600.0,
        "peak_model_state_mib": memory,
        "model_state_mib": parts,
        "layout": "tensor parallel 2 x data parallel 1, float32",
    }


def test_thresholds_and_the_order_of_memory(compare):
    good = {"ppo": result(memory=3), "grpo": result(memory=1), "online_dpo": result(0.71, 2), "rlhf": result(0.4)}
    assert compare.failures(good) == []
    assert "online_dpo: held-out" in compare.failures(good | {"online_dpo": result(0.69, 2)})[0]
    assert "0.39, wanted at least 0.4" in compare.failures(good | {"rlhf": result(0.39)})[0]
    unmeasured = result(None) | {"heldout_sampled_before": None}
    assert "rlhf: held-out" in compare.failures(good | {"rlhf": unmeasured})[0]
    assert "should fall" in compare.failures(good | {"grpo": result(memory=2)})[0]


def test_the_table_has_a_row_for_each_and_the_layout(compare):
    lines = compare.table({"ppo": result(), "grpo": result() | {"heldout_sampled_before": None}}).splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[2].startswith("| ppo | 0.300 | 0.900 | 5 |") and lines[3].startswith("| grpo |  | 0.900 |")
    assert "tensor parallel 2 x data parallel 1" in lines[-1]


def test_its_configurations_are_whole(compare):
    for name in compare.THRESHOLDS:
        file = ROOT / "configs" / f"arithmetic_{name}.yaml"
        config = load(TrainConfig, [file], [], lambda algorithm: algorithms.get(algorithm).Config)
        check(config, algorithms.get(config.algorithm.name).needs(config.algorithm))
        assert f"# Run: megarl train configs/{file.name}" in file.read_text().splitlines()[1]
        assert config.trainer.output_dir == f"runs/compare/{name}"
    load(RewardModelTrainConfig, [ROOT / "configs" / "arithmetic_reward_model.yaml"], [], lambda name: None)
