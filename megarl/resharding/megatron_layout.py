"""The pieces of a Megatron rank, computed from its coordinates: any rank can compute any other's without asking it."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from megarl.models.weights import Copy, Entry, FusedQKV, GateUp, Vocabulary, WeightTable
from megarl.parallel.layout import Layout
from megarl.resharding.pieces import Piece, TensorMeta


def _rows(name: str, first: int, last: int, tail: tuple[int, ...], tensor: str, local_row: int) -> Piece:
    """Rows [first, last) of a checkpoint tensor, at row `local_row` of a local tensor with the same trailing shape."""
    width = tail[0] if tail else 1
    strides = (width, 1) if tail else (1,)
    return Piece(name, ((first, last), *((0, n) for n in tail)), tensor, local_row * width, strides)


def _copy(entry: Copy, shape, tensor: str, tp_rank: int, tp_size: int) -> list[Piece]:
    if entry.split is None:
        return [_rows(entry.hf, 0, shape[0], shape[1:], tensor, 0)]
    share = shape[entry.split] // tp_size
    first, last = tp_rank * share, (tp_rank + 1) * share
    if entry.split == 0:
        return [_rows(entry.hf, first, last, shape[1:], tensor, 0)]
    return [Piece(entry.hf, ((0, shape[0]), (first, last)), tensor, 0, (share, 1))]


def _vocabulary(entry: Vocabulary, shape, tensor: str, tp_rank: int, tp_size: int) -> list[Piece]:
    share = -(-shape[0] // tp_size)
    first, last = min(tp_rank * share, shape[0]), min((tp_rank + 1) * share, shape[0])
    return [_rows(entry.hf, first, last, shape[1:], tensor, 0)] if last > first else []


def _fused_qkv(entry: FusedQKV, table: WeightTable, shape, tensor: str, tp_rank: int, tp_size: int) -> list[Piece]:
    groups, dim, tail = table.num_query_groups // tp_size, table.head_dim, shape[1:]
    query_rows = table.heads_per_group * dim
    pieces = []
    for local in range(groups):
        group = tp_rank * groups + local
        at = local * (query_rows + 2 * dim)
        pieces += [
            _rows(entry.q, group * query_rows, (group + 1) * query_rows, tail, tensor, at),
            _rows(entry.k, group * dim, (group + 1) * dim, tail, tensor, at + query_rows),
            _rows(entry.v, group * dim, (group + 1) * dim, tail, tensor, at + query_rows + dim),
        ]
    return pieces


def _gate_up(entry: GateUp, shape, tensor: str, tp_rank: int, tp_size: int) -> list[Piece]:
    share = shape[0] // tp_size
    first, last = tp_rank * share, (tp_rank + 1) * share
    return [
        _rows(entry.gate, first, last, shape[1:], tensor, 0),
        _rows(entry.up, first, last, shape[1:], tensor, share),
    ]


def _hf_names(entry: Entry) -> tuple[str, ...]:
    match entry:
        case FusedQKV():
            return (entry.q, entry.k, entry.v)
        case GateUp():
            return (entry.gate, entry.up)
        case _:
            return (entry.hf,)


def _at_layer(entry: Entry, layer: int) -> Entry:
    def fill(value):
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.replace("{i}", str(layer)) if isinstance(value, str) else value

    return type(entry)(**{name: fill(value) for name, value in vars(entry).items()})


def entries(table: WeightTable) -> list[Entry]:
    """Every entry of a model, layers written out: the embedding, the layers in order, the ends."""
    layers = [_at_layer(entry, i) for i in range(table.num_layers) for entry in table.layer]
    return [table.ends[0], *layers, *table.ends[1:]]


def checkpoint_names(table: WeightTable) -> list[str]:
    """Every checkpoint tensor that the table speaks of, in model order."""
    return [name for entry in entries(table) for name in _hf_names(entry)]


def _spelling(entry: Entry, local_names: Collection[str]) -> str:
    spellings = entry.megatron if isinstance(entry.megatron, tuple) else (entry.megatron,)
    present = [name for name in spellings if name in local_names]
    assert len(present) == 1, f"a Megatron model has exactly one of {spellings}, this one has {present}"
    return present[0]


def pieces(
    table: WeightTable,
    checkpoint_shapes: dict[str, tuple[int, ...]],
    local_names: Collection[str],
    tp_rank: int,
    tp_size: int,
) -> list[Piece]:
    """What tensor-parallel rank `tp_rank` of `tp_size` holds.

    Args:
        table: the family's weight table.
        checkpoint_shapes: shape of every checkpoint tensor.
        local_names: names of the Megatron model's parameters (the same on every rank of one pipeline stage).
    """
    found: list[Piece] = []
    for entry in entries(table):
        tensor = _spelling(entry, local_names)
        shape = checkpoint_shapes[_hf_names(entry)[0]]
        make = {
            Copy: _copy,
            Vocabulary: _vocabulary,
            FusedQKV: partial(_fused_qkv, table=table),
            GateUp: _gate_up,
        }[type(entry)]
        found += make(entry, shape=shape, tensor=tensor, tp_rank=tp_rank, tp_size=tp_size)
    return found


@dataclass(frozen=True)
class ShardedModel:
    """The parameters of one model on this rank, and how all ranks' parameters make up the checkpoint."""

    layout: Layout
    table: WeightTable
    checkpoint_shapes: dict[str, tuple[int, ...]]
    tensors: dict[str, torch.nn.Parameter]  # by Megatron name; the objects, since DDP moves their storage

    def pieces_of(self, rank: int) -> list[Piece]:
        """What `rank` holds; every data-parallel copy holds the same."""
        tp_size = self.layout.tp_size
        return pieces(self.table, self.checkpoint_shapes, self.tensors.keys(), rank % tp_size, tp_size)

    @cached_property
    def pieces(self) -> list[Piece]:
        """What this rank holds."""
        return self.pieces_of(self.layout.rank)

    @cached_property
    def sources(self) -> dict[int, list[Piece]]:
        """For each rank of the first data-parallel copy the pieces it contributes: each box comes from one rank."""
        taken: set[tuple] = set()
        chosen: dict[int, list[Piece]] = {}
        for rank in range(self.layout.tp_size):
            chosen[rank] = [p for p in self.pieces_of(rank) if (p.name, p.box) not in taken]
            taken |= {(p.name, p.box) for p in chosen[rank]}
        return chosen

    @cached_property
    def metas(self) -> list[TensorMeta]:
        """Every checkpoint tensor as it travels: in model order, in the parameters' own type."""
        dtype = str(next(iter(self.tensors.values())).dtype).removeprefix("torch.")
        return [TensorMeta(name, self.checkpoint_shapes[name], dtype) for name in checkpoint_names(self.table)]

    def check_covered(self) -> None:
        """Every element of every local parameter belongs to as many pieces as it should: one, padding rows none.

        Raises:
            ValueError: the checkpoint's shapes do not make up this model (config.json and safetensors disagree).
        """
        covered = Counter()
        for piece in self.pieces:
            covered[piece.tensor] += piece.numel
        padded = {entry.megatron for entry in self.table.ends if isinstance(entry, Vocabulary)}
        for name, tensor in self.tensors.items():
            fits = covered[name] <= tensor.numel() if name in padded else covered[name] == tensor.numel()
            if not fits:
                from_checkpoint = {p.name: self.checkpoint_shapes[p.name] for p in self.pieces if p.tensor == name}
                raise ValueError(
                    f"the checkpoint's tensors do not fit its config.json: {from_checkpoint or 'nothing'} give "
                    f"{covered[name]} of the {tensor.numel()} elements of {name} on rank {self.layout.rank}"
                )
