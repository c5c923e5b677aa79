"""A reward model learns preferences on two data-parallel ranks, and transformers loads what it leaves."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.config.root import RewardModelTrainConfig
from megarl.sft import reward_model
from tests.parallel_utils import run_ranks

ROWS = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": "no"} for a in range(4) for b in range(4)]
HELD_OUT = [{"prompt": f"{a}+5=", "chosen": f"{a + 5}", "rejected": "no"} for a in range(3)]


def _train(settings: dict) -> None:
    from megarl import sft

    sft.layouts.shutdown = lambda: None  # the ranks' own harness leaves the world
    reward_model(RewardModelTrainConfig.model_validate(settings), quiet=True)


@pytest.fixture(scope="module")
def run_dir(tiny_checkpoint, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("preferences")
    for name, rows in (("train", ROWS), ("val", HELD_OUT)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "trainer": {"output_dir": str(root / "run"), "total_steps": 12, "test_freq": 6, "n_gpus_per_node": 2},
        "model": {"path": str(tiny_checkpoint("qwen2-tied")), "dtype": "float32"},
        "optim": {"lr": 3e-3},
        "data": {"train_files": str(root / "train.jsonl"), "val_files": str(root / "val.jsonl"), "train_batch_size": 8},
    } | {"max_token_len_per_gpu": 2048}
    run_ranks(_train, 2, settings)
    return root / "run"


def test_it_starts_at_a_coin_s_toss_and_learns(run_dir):
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [m["loss"] for m in metrics if "loss" in m]
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-6)  # a head of zeros
    assert losses[-1] < 0.1
    assert [m["heldout/pair_accuracy"] for m in metrics if "heldout/pair_accuracy" in m][-1] == 1.0
    assert json.loads((run_dir / "summary.json").read_text())["heldout_pair_after"] == 1.0


def test_transformers_loads_it_and_agrees_about_the_preferences(run_dir):
    folder = run_dir / "model"
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 128)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in HELD_OUT:
        scores = []
        for answer in (row["chosen"], row["rejected"]):
            messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
            ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")["input_ids"]
            scores.append(model(ids).logits.item())
        assert scores[0] > scores[1]
