"""Files to ranks, ranks to files, ranks to ranks of another layout: nothing changes a bit, and bad files are named."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.model import ModelConfig
from megarl.models import build, hf_files
from megarl.parallel import layout as layouts
from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding import files
from tests import tiny_models
from tests.parallel_utils import run_ranks

LAYOUTS = {
    "qwen2-tied": [{}, dict(tp=2), dict(pp=2), dict(tp=2, pp=2)],
    "qwen3_moe": [dict(tp=2, ep=2), dict(pp=2, vpp=2), dict(ep=2, etp=2, tp=2), dict(tp=2, pp=2, ep=2)],
}


def _built(path: str, sizes: dict):
    layout = layouts.join(ParallelSizes(torch.distributed.get_world_size(), **sizes), False, 0)
    return build.build(hf_files.load_config(path), ModelConfig(path=path, dtype="float32"), layout), layout


def _converted_and_exported(path: str, folder: str, sizes: list[dict]):
    """Which (pair of layouts, tensor) differ from the loaded one, and where the sharded export went."""
    wrong = []
    loaded = {}
    for i, one in enumerate(sizes):
        module, layout = _built(path, one)
        loaded[i] = files.load(module, path, layout)
    for i, j in itertools.permutations(range(len(sizes)), 2):
        module, layout = _built(path, sizes[j])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
        target = files.ShardedModel(
            layout, loaded[j].table, loaded[j].checkpoint_shapes, dict(module.named_parameters())
        )
        files.convert(loaded[i], target, bucket_bytes=20_000)
        wrong += [(i, j, name) for name, t in target.tensors.items() if not torch.equal(t, loaded[j].tensors[name])]
    files.SHARD_BYTES = 100_000
    for i in range(len(sizes)):
        files.export(loaded[i], path, Path(folder, str(i)))
    return wrong


@pytest.mark.parametrize("family", LAYOUTS)
def test_any_layout_to_any_other_and_back_to_files(family, tmp_path):
    source = tiny_models.make(family, tmp_path / "source")
    for wrong in run_ranks(_converted_and_exported, 4, str(source), str(tmp_path), LAYOUTS[family]):
        assert wrong == []
    want = load_file(source / "model.safetensors")
    for i in range(len(LAYOUTS[family])):
        index = json.loads((tmp_path / str(i) / hf_files.INDEX).read_text())
        shards = sorted(set(index["weight_map"].values()))
        assert len(shards) > 2 and index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
        found = {name: t for shard in shards for name, t in load_file(tmp_path / str(i) / shard).items()}
        assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def _load(path: str) -> str:
    try:
        module, layout = _built(path, {})
        files.load(module, path, layout)
    except ValueError as error:
        return str(error)
    return ""


def _load_each(paths: list[str]) -> list[str]:
    return [_load(path) for path in paths]


def _broken(name: str, folder: Path, change) -> str:
    source = tiny_models.make(name, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_wrong_tensor_is_named(tmp_path):
    norm, up = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
    cases = {
        f"lacks 1 of the tensors.*{norm}": lambda t: t.pop(norm),
        "has 1 tensors that a qwen2 .* does not have: model.layers.9.extra": lambda t: t.update(
            {"model.layers.9.extra": torch.zeros(2)}
        ),
        f"{up}": lambda t: t.update({up: t[up][:-1].contiguous()}),
    }
    paths = [_broken("qwen2-untied", tmp_path / str(i), change) for i, change in enumerate(cases.values())]
    saved_head = _broken(
        "qwen2-tied", tmp_path / "head", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    *said, accepted = run_ranks(_load_each, 1, [*paths, saved_head])[0]
    for pattern, message in zip(cases, said, strict=True):
        assert re.search(pattern, message), message
    assert accepted == ""
