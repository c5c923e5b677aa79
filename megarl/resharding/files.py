"""Load (files -> Megatron ranks), export (ranks -> files), convert (ranks -> ranks of another layout): three plans."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl import models
from megarl.models import hf_files
from megarl.models.weights import Vocabulary, WeightTable
from megarl.parallel import device
from megarl.parallel.layout import Layout
from megarl.resharding import transport
from megarl.resharding.gathered import gather
from megarl.resharding.megatron_layout import ShardedModel, checkpoint_names
from megarl.resharding.pieces import Holding, TensorMeta, buckets, unpack
from megarl.resharding.plan import Sources, make_plan, whole

SHARD_BYTES = 4 << 30
FILES = -1  # the source of a load: not a rank
# Saved by some, computed or copied by all: not weights of their own.
_DERIVED = (".rotary_emb.inv_freq", ".attn.masked_bias")


def load(
    model: torch.nn.Module,
    path: str,
    layout: Layout,
    table: WeightTable | None = None,
    fresh: Mapping[str, tuple[int, ...]] = {},
) -> ShardedModel:
    """Fill a freshly built model from a Hugging Face checkpoint; no rank reads a byte that it does not hold.

    Args:
        model: from `build`.
        path: the checkpoint.
        layout: of the ranks.
        table: of a model that is not the family's own, such as one with a value head; tensors that only the family's
            table speaks of are then left in the files.
        fresh: shapes of tensors that the checkpoint may lack; those that it lacks stay as they were built.

    Raises:
        ValueError: a tensor is missing, has no place in the model, or has another shape than config.json says.
    """
    hf = hf_files.load_config(path)
    checkpoint = hf_files.Checkpoint(path)
    own_table = models.get(hf.model_type).weight_table(hf)
    table = table or own_table
    names = checkpoint_names(table)
    fresh = {name: shape for name, shape in fresh.items() if name not in checkpoint.names}
    _check_names([name for name in names if name not in fresh], checkpoint.names, checkpoint_names(own_table), hf, path)
    sharded = ShardedModel(
        layout=layout,
        table=table,
        checkpoint_shapes={name: fresh.get(name) or checkpoint.shape(name) for name in names},
        tensors=dict(model.named_parameters()),
    )
    sharded.check_covered()
    for entry in (*table.first, *table.last):
        if isinstance(entry, Vocabulary):
            _check_vocabulary(sharded.checkpoint_shapes[entry.hf], hf, entry.hf, path)
    for name in sharded.padded:
        # Rows past the vocabulary are in no softmax; weight decay must see zeros there.
        sharded.tensors[name].detach().zero_()
    metas = {meta.name: meta for meta in sharded.metas if meta.name not in fresh}
    on_disk = Holding((FILES,), [whole(meta.name, meta.shape) for meta in metas.values()])
    wanted = Holding((layout.rank,), [piece for piece in sharded.pieces if piece.name in metas])
    for transfer in make_plan(Sources([on_disk]), [wanted], metas):
        take = transfer.take
        take.view(sharded.tensors[take.tensor]).copy_(checkpoint.read(take.name, take.box))
    return sharded


def _check_names(wanted: list[str], held: set[str], known: list[str], hf, path: str) -> None:
    missing = [name for name in wanted if name not in held]
    if missing:
        raise ValueError(
            f"model folder {path} lacks {len(missing)} of the tensors that its config.json asks for: {_first(missing)}"
        )
    spare = {"lm_head.weight"} if hf.tie_word_embeddings else set()  # a saved copy of the embedding
    extra = sorted(name for name in held - set(wanted) - set(known) - spare if not name.endswith(_DERIVED))
    if extra:
        raise ValueError(
            f"model folder {path} has {len(extra)} tensors that a {hf.model_type} of its config.json does not have: "
            f"{_first(extra)}. They would be lost; is config.json that of another model?"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def convert(source: ShardedModel, destination: ShardedModel, bucket_bytes: int = 256 << 20) -> None:
    """Copy a model's weights into one of another layout over the same ranks; no file, no whole tensor. Collective.

    Peak extra memory: one bucket for what a rank sends and one for what it receives.

    Raises:
        ValueError: the two are not of the same checkpoint shapes.
    """
    if source.checkpoint_shapes != destination.checkpoint_shapes:
        different = dict(source.checkpoint_shapes.items() ^ destination.checkpoint_shapes.items())
        raise ValueError(f"the two models differ in {len(different)} checkpoint tensors: {_first(sorted(different))}")
    metas = {meta.name: meta for meta in destination.metas}
    plan = make_plan(Sources(source.holdings), destination.holdings, metas, bucket_bytes)
    for name in destination.padded:
        destination.tensors[name].detach().zero_()
    transport.exchange_among_ranks(
        plan, source.layout.rank, source.tensors, destination.tensors, metas, device.current()
    )


def _check_vocabulary(shape: tuple[int, ...], hf, name: str, path: str) -> None:
    """Ranks share the rows by config.json's vocab_size; another number of rows would shift every later rank's."""
    if shape != (hf.vocab_size, hf.hidden_size):
        raise ValueError(
            f"model folder {path}: {name} has the shape {list(shape)}, but config.json says vocab_size={hf.vocab_size} "
            f"and hidden_size={hf.hidden_size}; correct config.json"
        )


def export(
    sharded: ShardedModel,
    source: str,
    folder: Path,
    on_progress: Callable[[str], None] = lambda line: None,
    config_changes: Mapping[str, Any] = {},
) -> None:
    """Write a checkpoint that `transformers` loads. Collective; the ranks of the first node write in turns.

    Extra memory of a writer: one shard, at most 4 GiB (a larger tensor is a shard of its own).

    The folder appears only when it is whole: it is written beside its place and renamed at the end.

    Args:
        sharded: the model.
        source: the checkpoint it was loaded from, for config.json and the tokenizer.
        folder: where to; an existing folder is replaced.
        on_progress: called on rank 0 with a line for each shard.
        config_changes: entries of config.json that differ from the source's.
    """
    shards = buckets(sharded.metas, SHARD_BYTES)
    names = (
        [hf_files.SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    partial = folder.with_name(f".{folder.name}.partial")
    if sharded.layout.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    writers = transport.ranks_per_node(sharded.layout.world_size)
    owners = [i % writers for i in range(len(shards))]
    for name, (shard, flat) in zip(names, gather(sharded, shards, owners), strict=True):
        if sharded.layout.is_first:
            on_progress(f"writing {folder.name}/{name}")
        if flat is not None:
            _write(partial / name, shard, flat)
    dist.barrier()
    if sharded.layout.is_first:
        if len(shards) > 1:
            weight_map = {meta.name: name for name, shard in zip(names, shards, strict=True) for meta in shard}
            total = sum(meta.nbytes for meta in sharded.metas)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / hf_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
        hf_files.write_side_files(source, partial, getattr(torch, sharded.metas[0].dtype), config_changes)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier()


def _write(file: Path, shard: list[TensorMeta], flat: torch.Tensor) -> None:
    tensors: Mapping[str, torch.Tensor] = {key: value.cpu() for key, value in unpack(shard, flat).items()}
    save_file(tensors, file, metadata={"format": "pt"})
