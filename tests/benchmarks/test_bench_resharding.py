"""What the resharding benchmark says of paper-size layouts holds, and its engine layouts are those of vLLM's loader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoConfig

from tests.parallel_utils import run_ranks
from tests.resharding.engine_families import checkpoint

# Ranks of a spawn import this file by its path, without conftest.py.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from resharding_engines import EngineSizes, stage_layers, worker_pieces
from resharding_models import MODELS, gqa_model
from resharding_simulated import CASES, QUICK, simulate

# Of the published checkpoints; DeepSeek-V3 without its multi-token-prediction layer.
NUM_PARAMETERS = {
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_published_number_of_parameters(name):
    assert MODELS[name]().num_parameters == NUM_PARAMETERS[name]


def _check(case) -> None:
    planned, gathered = simulate(case, repetitions=1)
    assert planned["ingress_over_bound"] == 1 and planned["fallback_bytes"] == 0
    assert planned["egress_bytes_total"] <= 1.1 * planned["model_bytes"]
    assert planned["egress_bytes_max"] <= 1.25 * planned["egress_bytes_mean"]
    assert planned["egress_bytes_max"] >= planned["egress_bytes_max_least"]
    assert planned["peak_extra_bytes"] <= 2 * (256 << 20)
    assert gathered["ingress_bytes_max"] >= 1.9 * planned["ingress_bytes_max"]
    assert gathered["egress_bytes_max"] >= 10 * planned["egress_bytes_max"]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_planned_moves_each_byte_once_and_evenly(case):
    _check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=lambda case: case.name)
def test_planned_moves_each_byte_once_and_evenly_at_any_size(case):
    _check(case)


# Ceilings in CPU seconds of one rank; one case of each model in QUICK is the one that the ceiling is for.
PLANNING = [
    ("Qwen2.5-32B: 64 ranks (TP8 PP2) to 32 (TP4 x 8)", 0.2),
    ("Qwen3-30B-A3B: 64 ranks (TP1 PP1 EP8) to 32 (TP4 EP x 8)", 0.3),
    ("DeepSeek-V3: 512 ranks (TP1 PP16 EP32) to 256 (TP32 EP x 8)", 5.0),
]


@pytest.mark.parametrize("name, ceiling", PLANNING)
def test_planning_is_quick(name, ceiling):
    (case,) = [case for case in CASES if case.name == name]
    assert simulate(case, repetitions=3)[0]["planning_seconds"] <= ceiling


def _differences(folders: list[tuple[str, dict]]) -> list[tuple[int, list, list]]:
    """(pieces traced, those that only vLLM's loader has, those that only the benchmark has) of each engine."""
    from megarl.resharding.vllm_reload import traced_layout
    from tests.resharding.vllm_models import checkpoint_tensors, metas, vllm_model

    found = []
    for folder, coordinates in folders:
        tensors = checkpoint_tensors(folder)
        with vllm_model(folder, **coordinates) as (module, _):
            layout = traced_layout(module, metas(tensors))
        assert layout.whole == []
        traced = {tuple(piece) for piece in layout.pieces}
        model = gqa_model("small", AutoConfig.from_pretrained(folder))
        assert model.shapes == {name: tuple(tensors[name].shape) for name in model.shapes}
        engine = EngineSizes(coordinates.get("tp", 1), coordinates.get("pp", 1), coordinates.get("ep", False))
        computed = {tuple(piece) for piece in worker_pieces(model, engine, dist.get_rank())}
        found.append((len(traced), sorted(traced - computed), sorted(computed - traced)))
    return found


def test_engine_layouts_are_those_of_vllms_loader(tmp_path):
    """With more workers than KV heads (two), with stages, with experts cut and dealt out."""
    folders = {family: str(checkpoint(family, tmp_path / family, 0)) for family in ("llama", "qwen2-tied", "qwen3_moe")}
    engines = [
        ("llama", dict(tp=4)),
        ("qwen2-tied", dict(tp=2, pp=2)),
        ("qwen3_moe", dict(tp=4)),
        ("qwen3_moe", dict(tp=4, ep=True)),
    ]
    for found in run_ranks(_differences, 4, [(folders[family], sizes) for family, sizes in engines]):
        for (family, sizes), (traced, only_vllm, only_ours) in zip(engines, found, strict=True):
            assert traced > 20 and only_vllm == only_ours == [], f"{family} {sizes}: {only_vllm[:2]} {only_ours[:2]}"


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8, 16])
def test_stages_are_vllms(pp):
    from vllm.distributed.utils import get_pp_indices

    for num_layers in (16, 61, 94):
        for rank in range(pp):
            assert stage_layers(num_layers, rank, pp) == range(*get_pp_indices(num_layers, rank, pp))


@pytest.mark.slow
def test_quick_run_writes_every_design(tmp_path):
    root, out = Path(__file__).parents[2], tmp_path / "results" / "resharding.json"
    command = [sys.executable, "benchmarks/bench_resharding.py", "--quick", "--out", str(out)]
    subprocess.run(command, cwd=root, check=True, timeout=200)
    results = json.loads(out.read_text())["results"]
    assert {(r["kind"], r["design"]) for r in results} == {
        ("simulated", "planned"), ("simulated", "gathered"),
        ("measured", "planned"), ("measured", "gathered"), ("measured", "megatron"),
    }  # fmt: skip
    for r in results:
        assert (r["seconds"] is not None) == (r["kind"] == "measured")
        assert (r["planning_seconds"] is None) == (r["design"] == "gathered")
        assert r["egress_bytes_max"] >= r["egress_bytes_mean"] > 0 and r["peak_extra_bytes"] > 0
    sync = {r["design"]: r for r in results if r["case"].startswith("sync")}
    assert sync["planned"]["ingress_bytes_max"] == sync["planned"]["ingress_lower_bound"]
    assert out.with_suffix(".png").stat().st_size > 10_000
