"""Load (files -> Megatron ranks, each reading only its own bytes) and export (Megatron ranks -> safetensors files)."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl import models
from megarl.models import hf_files
from megarl.models.weights import Vocabulary
from megarl.parallel.layout import Layout
from megarl.resharding.gathered import gather
from megarl.resharding.megatron_layout import ShardedModel, checkpoint_names
from megarl.resharding.pieces import buckets, unpack

SHARD_BYTES = 4 << 30


def load(model: torch.nn.Module, path: str, layout: Layout) -> ShardedModel:
    """Fill a freshly built model from a Hugging Face checkpoint; no rank reads a byte that it does not hold.

    Raises:
        ValueError: a tensor is missing or has another shape than config.json says.
    """
    hf = hf_files.load_config(path)
    checkpoint = hf_files.Checkpoint(path)
    table = models.get(hf.model_type).weight_table(hf)
    missing = [name for name in checkpoint_names(table) if name not in checkpoint.names]
    if missing:
        raise ValueError(
            f"model folder {path} lacks {len(missing)} of the tensors that its config.json asks for: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    sharded = ShardedModel(
        layout=layout,
        table=table,
        checkpoint_shapes={name: checkpoint.shape(name) for name in checkpoint_names(table)},
        tensors=dict(model.named_parameters()),
    )
    sharded.check_covered()
    for entry in (*table.first, *table.last):
        if isinstance(entry, Vocabulary):
            _check_vocabulary(sharded.checkpoint_shapes[entry.hf], hf, entry.hf, path)
    for name in sharded.padded:
        # Rows past the vocabulary are in no softmax; weight decay must see zeros there.
        sharded.tensors[name].detach().zero_()
    for piece in sharded.pieces:
        piece.view(sharded.tensors[piece.tensor]).copy_(checkpoint.read(piece.name, piece.box))
    return sharded


def _check_vocabulary(shape: tuple[int, ...], hf, name: str, path: str) -> None:
    """Ranks share the rows by config.json's vocab_size; another number of rows would shift every later rank's."""
    if shape != (hf.vocab_size, hf.hidden_size):
        raise ValueError(
            f"model folder {path}: {name} has the shape {list(shape)}, but config.json says vocab_size={hf.vocab_size} "
            f"and hidden_size={hf.hidden_size}; correct config.json"
        )


def export(
    sharded: ShardedModel, source: str, folder: Path, on_progress: Callable[[str], None] = lambda line: None
) -> None:
    """Write a checkpoint that `transformers` loads. Collective; rank 0 writes, one shard of at most 4 GiB in memory.

    The folder appears only when it is whole: it is written beside its place and renamed at the end.

    Args:
        sharded: the model.
        source: the checkpoint it was loaded from, for config.json and the tokenizer.
        folder: where to; an existing folder is replaced.
        on_progress: called on rank 0 with a line for each shard of a model that has several.
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
    for name, (shard, flat) in zip(names, gather(sharded, shards), strict=True):
        if sharded.layout.is_first:
            on_progress(f"writing {folder.name}/{name}")
            tensors = {key: value.cpu() for key, value in unpack(shard, flat).items()}
            save_file(tensors, partial / name, metadata={"format": "pt"})
    if sharded.layout.is_first:
        if len(shards) > 1:
            weight_map = {meta.name: name for name, shard in zip(names, shards, strict=True) for meta in shard}
            total = sum(meta.nbytes for meta in sharded.metas)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / hf_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
        hf_files.write_side_files(source, partial, getattr(torch, sharded.metas[0].dtype))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier()
