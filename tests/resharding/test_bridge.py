"""Real syncs: any trainer layout into running engines, which then compute what transformers computes of the same files.

One engine serves all layouts of a (family, engine TP); every sync is audited.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.model import ModelConfig
from megarl.config.rollout import SyncConfig
from megarl.models import build, hf_files
from megarl.parallel import layout as layouts
from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding import files
from megarl.resharding.bridge import Bridge
from megarl.rollout.start import start_driver
from tests.parallel_utils import run_ranks
from tests.resharding.engine_families import SEQUENCES, checkpoint, expected_scores

LAYOUTS = {
    "TP1": {},
    "TP2": dict(tp=2),
    "PP2": dict(pp=2),
    "TP2xDP2": dict(tp=2),
    "EP2": dict(ep=2),
    "ETP2": dict(tp=2, etp=2),
    "VPP2": dict(pp=2, vpp=2),
}
DENSE = ("TP1", "TP2", "PP2", "VPP2")


def sharded(path: str, sizes: ParallelSizes):
    """The checkpoint on this rank of a layout over all ranks."""
    layout = layouts.join(sizes, sequence_parallel=False, seed=0)
    module = build.build(hf_files.load_config(path), ModelConfig(path=path, dtype="float32"), layout)
    return files.load(module, path, layout), layout


def worst_gap(driver, expected: list[list[float]]) -> float:
    """The largest |engine - expected| over engines and tokens."""
    return max(
        float(np.abs(scores - np.array(want)).max())
        for engine in driver.score(SEQUENCES)
        for scores, want in zip(engine, expected, strict=True)
    )


def _sync_all(config, run_dir: str, names: list[str], news: list[str], expected: list, sync: dict):
    """Every layout's weights into the same engines; returns rank 0's findings per layout."""
    found = {}
    world = torch.distributed.get_world_size()
    layout = layouts.join(ParallelSizes(world), sequence_parallel=False, seed=0)
    with start_driver(config, Path(run_dir), layout.is_first) as driver:
        driver.wait_until_ready(print)
        for number, (name, new, want) in enumerate(zip(names, news, expected, strict=True)):
            model, layout = sharded(new, ParallelSizes(world, **LAYOUTS[name]))
            for mode in ("planned", "gathered") if number == 0 else ("planned",):
                ways = sync if mode == "planned" else {}
                bridge = Bridge(model, layout, SyncConfig(mode=mode, bucket_size_mib=1, **ways), driver)
                bridge.connect()
                metrics = bridge.sync(version=number + 1)
                if layout.is_first:
                    found[name, mode] = dict(
                        gap=worst_gap(driver, want),
                        scores=[s.tolist() for s in driver.score(SEQUENCES)[0]],
                        audited="sync/audit_seconds" in metrics,
                        ingress=bridge.replicas[0].plan.ingress(),
                        upstream=[replica.upstream for replica in bridge.replicas],
                    )
    return found


def run(family: str, names: list[str], world: int, tiny_config, tmp_path: Path, rollout: dict, **sync) -> dict:
    old = checkpoint(family, tmp_path / "old", 0)
    news = [checkpoint(family, tmp_path / name, seed + 1) for seed, name in enumerate(names)]
    config = tiny_config(
        {
            "actor": {"model": {"path": str(old), "dtype": "float32"}},
            "data": {"max_prompt_length": 24},
            "rollout": rollout,
        }
    )
    expected = [expected_scores(new) for new in news]
    paths = [str(new) for new in news]
    found = run_ranks(
        _sync_all, world, config, str(tmp_path / "run"), names, paths, expected, sync, timeout_seconds=500
    )[0]
    for case in found.values():
        assert case["audited"]
        assert case["gap"] <= 2e-4, found
    assert found[names[0], "planned"]["scores"] == found[names[0], "gathered"]["scores"]
    return found


@pytest.mark.parametrize("family, names", [("qwen2-tied", DENSE), ("qwen3_moe", ("EP2", "ETP2", "PP2"))])
def test_any_layout_into_two_replicas(family, names, tiny_config, tmp_path):
    found = run(family, list(names), 2, tiny_config, tmp_path, {"num_engines": 2})
    assert all(case["upstream"] == ["trainer", "engine"] for (_, mode), case in found.items() if mode == "planned")


def test_into_a_tensor_parallel_engine_through_shared_memory(tiny_config, tmp_path):
    rollout = {"tensor_model_parallel_size": 2}
    found = run("llama", ["TP2", "PP2"], 2, tiny_config, tmp_path, rollout, transport="shared_memory")
    assert found["TP2", "planned"]["upstream"] == ["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("engine_tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen2-untied", "llama", "qwen3_moe"])
def test_every_layout_into_every_engine(family, engine_tp, tiny_config, tmp_path):
    """On four ranks, so that every layout has data-parallel copies that share the sending."""
    names = [name for name in LAYOUTS if family == "qwen3_moe" or not {"ep", "etp"} & set(LAYOUTS[name])]
    run(family, names, 4, tiny_config, tmp_path, {"tensor_model_parallel_size": engine_tp})
