"""Megatron models equal transformers' on packed rows, in every layout; their files go both ways."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.config.model import ModelConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import cumulative, positions
from megarl.models import build, hf_files
from megarl.models.attention import pack_sequences
from megarl.parallel import layout as layouts
from megarl.resharding import files
from tests import tiny_models
from tests.parallel_utils import run_ranks

SEQUENCES = [[5, 9, 130, 7, 2], [17], list(range(3, 60)), [99, 98, 97, 96, 95, 94, 93, 92, 91], [4, 4]]


def _gathered_logits(model, layout) -> torch.Tensor:
    tokens = torch.tensor(sum(SEQUENCES, []))
    lengths = torch.tensor([len(s) for s in SEQUENCES])
    pad = -len(tokens) % layout.tp_size if layout.sequence_parallel else 0
    padded = torch.nn.functional.pad(tokens, (0, pad))
    position_ids = torch.nn.functional.pad(positions(lengths), (0, pad))
    with torch.no_grad():
        local = model(
            padded[None], position_ids[None], None, packed_seq_params=pack_sequences(cumulative(lengths), len(padded))
        )
    shards = [torch.empty_like(local) for _ in range(layout.tp_size)]
    dist.all_gather(shards, local.contiguous(), group=layout.groups.tp)
    return torch.cat(shards, dim=-1)[0, : len(tokens)]


def _load_score_export(folders: dict[str, str], sequence_parallel: bool, out: str) -> dict[str, torch.Tensor]:
    config = ParallelConfig(tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel)
    layout = layouts.initialize(config, seed=0)
    found = {}
    for name, folder in folders.items():
        settings = ModelConfig(path=folder, dtype="float32", transformer_impl="local")
        model = build.build(hf_files.load_config(folder), settings, layout).eval()
        sharded = files.load(model, folder, layout)
        found[name] = _gathered_logits(model, layout)[:, : tiny_models.SHAPE["vocab_size"]]
        files.export(sharded, folder, Path(out, name))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny_models.make(name, root / name) for name in tiny_models.CONFIGS}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_packed_logits_and_exported_files_equal_transformers(checkpoints, tmp_path, tp, sequence_parallel):
    ranks = run_ranks(
        _load_score_export, tp, {n: str(f) for n, f in checkpoints.items()}, sequence_parallel, str(tmp_path)
    )
    for name, folder in checkpoints.items():
        expected = tiny_models.logits(folder, SEQUENCES)
        for found in ranks:
            assert (found[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        assert (tiny_models.logits(tmp_path / name, SEQUENCES) - expected).abs().max() <= 1e-5, name
        original, exported = hf_files.Checkpoint(str(folder)), hf_files.Checkpoint(str(tmp_path / name))
        assert original.names == exported.names
        for key in original.names:
            whole = tuple((0, n) for n in original.shape(key))
            assert torch.equal(original.read(key, whole), exported.read(key, whole)), key


def _refusal(folder: str) -> str:
    layout = layouts.initialize(ParallelConfig(), seed=0)
    settings = ModelConfig(path=folder, dtype="float32", transformer_impl="local")
    model = build.build(hf_files.load_config(folder), settings, layout)
    with pytest.raises(ValueError) as error:
        files.load(model, folder, layout)
    return str(error.value)


def test_a_vocabulary_that_config_and_files_disagree_about_is_refused(tmp_path):
    """Zero rows would enter the softmax, and every later tensor-parallel rank would hold other rows' weights."""
    folder = tiny_models.make("qwen2-tied", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 2}))
    (message,) = run_ranks(_refusal, 1, str(folder))
    assert "has the shape [131, 64], but config.json says vocab_size=133" in message
