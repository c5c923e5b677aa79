"""Weights from a tensor-parallel trainer into a running engine, which then equals one started on the exported files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.rollout import SyncConfig
from megarl.data.batch import from_rollouts
from megarl.parallel import layout as layouts
from megarl.resharding import files
from megarl.resharding.bridge import Bridge
from megarl.rollout.start import start_driver
from megarl.training.policy import Policy
from megarl.types import Prompt, Rollout
from tests.parallel_utils import run_ranks
from tests.resharding.engine_families import checkpoint

PROMPTS = [np.array([3, 40 + i, 50 + 2 * i, 9 + i, 4], np.int32) for i in range(12)]


def _greedy(driver) -> list[list[int]]:
    return [c[0].token_ids.tolist() for c in driver.generate(PROMPTS, n=1, temperature=0.0, max_tokens=8, seed=0)]


def _agreement(policy: Policy, driver, layout) -> float:
    """Largest |trainer - engine| log-prob over sampled tokens; the samples are drawn on rank 0 and scored by all."""
    completions = driver.generate(PROMPTS, n=2, temperature=1.0, max_tokens=8, seed=1) if layout.is_first else None
    if layout.is_first:
        rollouts = [
            Rollout(Prompt(i, p, ""), c, np.zeros(2), {}, [""] * 2)
            for i, (p, c) in enumerate(zip(PROMPTS, completions))
        ]
        batch = [from_rollouts(rollouts)]
    else:
        batch = [None]
    tensors = [
        "tokens",
        "position_ids",
        "cu_seqlens",
        "loss_mask",
        "weight_version",
        "index",
        "group_ids",
        "scores",
        "rollout_logprobs",
    ]
    shared = [
        torch.tensor([len(batch[0].tokens), len(batch[0].index)])
        if layout.is_first
        else torch.zeros(2, dtype=torch.long)
    ]
    torch.distributed.broadcast(shared[0], 0)
    if not layout.is_first:
        n, b = shared[0].tolist()
        like = from_rollouts([Rollout(Prompt(0, PROMPTS[0], ""), [_one_token()] * 2, np.zeros(2), {}, [""] * 2)])
        sizes = {"cu_seqlens": b + 1, "index": b, "group_ids": b, "scores": b}
        batch = [like.with_(**{t: torch.zeros(sizes.get(t, n), dtype=getattr(like, t).dtype) for t in tensors})]
    for name in tensors:
        torch.distributed.broadcast(getattr(batch[0], name), 0)
    logprobs, _ = policy.logprobs(batch[0], 64)
    assert set(batch[0].weight_version.tolist()) == {-1, 1}
    return float((logprobs - batch[0].rollout_logprobs).abs().max())


def _one_token():
    from megarl.types import Completion

    one = np.ones(1, np.int32)
    return Completion(one, one.astype(np.float32), "length", one.astype(np.uint8), one)


def _sync_and_export(config, new_weights: str, exported: str, run_dir: str):
    parallel = config.parallel.model_copy(update={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    layout = layouts.initialize(parallel, 0)
    with start_driver(config, Path(run_dir), layout.is_first) as driver:
        policy = Policy(config.actor.model.model_copy(update={"path": new_weights}), layout)
        driver.wait_until_ready(print)
        before = _greedy(driver) if layout.is_first else None
        bridge = Bridge(policy.sharded, layout, SyncConfig(bucket_size_mib=1), driver)
        bridge.connect()
        bridge.sync(version=1)
        after = _greedy(driver) if layout.is_first else None
        gap = _agreement(policy, driver, layout)
        files.export(policy.sharded, new_weights, Path(exported))
        bridge.sync(version=2)  # a second one installs over the first
        again = _greedy(driver) if layout.is_first else None
    return dict(before=before, after=after, again=again, gap=gap)


def _fresh_engine(config, run_dir: Path) -> list[list[int]]:
    with start_driver(config, run_dir, True) as driver:
        driver.wait_until_ready(print)
        return _greedy(driver)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-tied",
        "qwen3_moe",
        pytest.param("qwen2-untied", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_greedy_completions_equal_those_of_a_fresh_engine(family, tiny_config, tmp_path):
    old, new = (checkpoint(family, tmp_path / name, seed) for name, seed in (("old", 1), ("new", 2)))
    exported = tmp_path / "exported"

    def config_for(folder):
        return tiny_config(
            {"actor": {"model": {"path": str(folder), "dtype": "float32"}}, "data": {"max_prompt_length": 24}}
        )

    arguments = (config_for(old), str(new), str(exported), str(tmp_path / "run"))
    found = run_ranks(_sync_and_export, 2, *arguments, timeout_seconds=200)[0]
    fresh = _fresh_engine(config_for(exported), tmp_path / "fresh")
    assert found["before"] != found["after"]
    assert found["after"] == found["again"] == fresh
    assert found["gap"] <= 1e-4
