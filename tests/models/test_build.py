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
from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding import files
from tests import tiny_models
from tests.parallel_utils import run_ranks

SEQUENCES = [[5, 9, 130, 7, 2], [17], list(range(3, 60)), [99, 98, 97, 96, 95, 94, 93, 92, 91], [4, 4]]


LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2": dict(tp=2),
        "tp2 sp": dict(tp=2, sequence_parallel=True),
        "pp2": dict(pp=2),
        "pp2 vpp2": dict(pp=2, vpp=2),
        "ep2": dict(ep=2),
        "etp2": dict(etp=2),
        "tp2 ep2": dict(tp=2, ep=2),
        "tp2 ep2 sp": dict(tp=2, ep=2, sequence_parallel=True),
    },
    4: {
        "tp2 pp2 sp": dict(tp=2, pp=2, sequence_parallel=True),
        "ep2 etp2": dict(ep=2, etp=2),
        "tp2 pp2 ep2 first": dict(tp=2, pp=2, ep=2, first_stage_layers=1),
    },
}


def _fits(name: str, sizes: dict) -> bool:
    config = tiny_models.CONFIGS[name]()
    has_experts = config.model_type == "qwen3_moe"
    deep = config.num_hidden_layers == tiny_models.DEEP["num_hidden_layers"]
    return (has_experts or not {"ep", "etp"} & set(sizes)) and (deep or not {"vpp", "first_stage_layers"} & set(sizes))


def _forward(model, layout, tokens, position_ids, packed) -> torch.Tensor:
    """The last stage's output, on every stage: chunk by chunk, each stage hands its hidden states to the next."""
    chunks = list(model) if layout.sizes.vpp > 1 else [model]
    stages, mine = dist.get_process_group_ranks(layout.groups.pp), layout.coordinates.pp
    shape = (tokens.numel() // (layout.tp_size if layout.sequence_parallel else 1), 1, chunks[0].config.hidden_size)
    handed = torch.empty(shape)
    places = [(chunk, stage) for chunk in range(len(chunks)) for stage in range(len(stages))]
    for place, following in zip(places, [*places[1:], None], strict=True):
        if place[1] == mine:
            chunks[place[0]].set_input_tensor(handed)
            output = chunks[place[0]](tokens[None], position_ids[None], None, packed_seq_params=packed)
        if following is not None and len(stages) > 1:
            if place[1] == mine:
                dist.send(output.contiguous(), stages[following[1]])
            elif following[1] == mine:
                dist.recv(handed, stages[place[1]])
    if mine != len(stages) - 1:
        output = torch.empty(1, tokens.numel(), chunks[0].vocab_size // layout.tp_size)
    dist.broadcast(output, stages[-1], group=layout.groups.pp)
    return output


def _gathered_logits(model, layout) -> torch.Tensor:
    tokens = torch.tensor(sum(SEQUENCES, []))
    lengths = torch.tensor([len(s) for s in SEQUENCES])
    pad = -len(tokens) % layout.tp_size if layout.sequence_parallel else 0
    padded = torch.nn.functional.pad(tokens, (0, pad))
    position_ids = torch.nn.functional.pad(positions(lengths), (0, pad))
    with torch.no_grad():
        local = _forward(model, layout, padded, position_ids, pack_sequences(cumulative(lengths), len(padded)))
    shards = [torch.empty_like(local) for _ in range(layout.tp_size)]
    dist.all_gather(shards, local.contiguous(), group=layout.groups.tp)
    return torch.cat(shards, dim=-1)[0, : len(tokens)]


def _load_score_export(folders: dict[str, str], out: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for label, given in LAYOUTS[dist.get_world_size()].items():
        sizes = {name: value for name, value in given.items() if name != "sequence_parallel"}
        layout = layouts.join(
            ParallelSizes(dist.get_world_size(), **sizes), given.get("sequence_parallel", False), seed=0
        )
        found[label] = {}
        for name in (name for name in folders if _fits(name, sizes)):
            settings = ModelConfig(path=folders[name], dtype="float32", transformer_impl="local")
            model = build.build(hf_files.load_config(folders[name]), settings, layout).eval()
            sharded = files.load(model, folders[name], layout)
            found[label][name] = _gathered_logits(model, layout)[:, : tiny_models.SHAPE["vocab_size"]]
            files.export(sharded, folders[name], Path(out, label, name))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny_models.make(name, root / name) for name in tiny_models.CONFIGS}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_packed_logits_and_exported_files_equal_transformers(checkpoints, tmp_path, world_size):
    ranks = run_ranks(_load_score_export, world_size, {n: str(f) for n, f in checkpoints.items()}, str(tmp_path))
    expected = {name: tiny_models.logits(folder, SEQUENCES) for name, folder in checkpoints.items()}
    for rank in ranks:
        for label, models in rank.items():
            for name, found in models.items():
                off = (found - expected[name]).abs().max()
                assert off <= 1e-5 * expected[name].abs().max(), (label, name, float(off))
    assert {name for models in ranks[0].values() for name in models} == set(checkpoints)
    for label, models in ranks[0].items():
        for name in models:
            original, exported = (
                hf_files.Checkpoint(str(folder)) for folder in (checkpoints[name], tmp_path / label / name)
            )
            assert original.names == exported.names
            for key in original.names:
                whole = tuple((0, n) for n in original.shape(key))
                assert torch.equal(original.read(key, whole), exported.read(key, whole)), (label, name, key)
    label, models = next(iter(ranks[0].items()))
    for name in models:  # transformers reads what we wrote
        assert (tiny_models.logits(tmp_path / label / name, SEQUENCES) - expected[name]).abs().max() <= 1e-5, name


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
