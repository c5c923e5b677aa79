"""The pieces of a Megatron rank, computed from its coordinates: any rank can compute any other's without asking it.

Local tensors are named as in `named_parameters()` of the rank's model: layers and experts are counted within the rank,
and with several model chunks on a stage (VPP) the chunk's number stands in front: "0.decoder.layers.1.mlp...".
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import torch

from megarl.models.weights import SPELLINGS, Copy, Entry, Experts, FusedQKV, GateUp, Spelling, Vocabulary, WeightTable
from megarl.parallel.coordinates import ParallelSizes
from megarl.parallel.layout import Layout
from megarl.resharding.pieces import Box, Holding, Piece, TensorMeta

Shape = tuple[int, ...]


class _Cut(NamedTuple):
    """A piece before it has names."""

    source: int  # which of the entry's checkpoint tensors
    box: Box
    offset: int
    strides: tuple[int, ...]


def _rows(source: int, first: int, last: int, tail: Shape, local_row: int) -> _Cut:
    """Rows [first, last) of a checkpoint tensor, at row `local_row` of a local tensor with the same trailing shape."""
    width = tail[0] if tail else 1
    return _Cut(source, ((first, last), *((0, n) for n in tail)), local_row * width, (width, 1) if tail else (1,))


def _copy(entry: Copy, shape: Shape, part: int, parts: int) -> list[_Cut]:
    if entry.split is None:
        return [_rows(0, 0, shape[0], shape[1:], 0)]
    share = shape[entry.split] // parts
    first, last = part * share, (part + 1) * share
    if entry.split == 0:
        return [_rows(0, first, last, shape[1:], 0)]
    return [_Cut(0, ((0, shape[0]), (first, last)), 0, (share, 1))]


def _vocabulary(shape: Shape, part: int, parts: int) -> list[_Cut]:
    share = -(-shape[0] // parts)
    first, last = min(part * share, shape[0]), min((part + 1) * share, shape[0])
    return [_rows(0, first, last, shape[1:], 0)] if last > first else []


def _fused_qkv(table: WeightTable, shape: Shape, part: int, parts: int) -> list[_Cut]:
    groups, dim, tail = table.num_query_groups // parts, table.head_dim, shape[1:]
    query_rows = table.heads_per_group * dim
    cuts = []
    for local in range(groups):
        group = part * groups + local
        at = local * (query_rows + 2 * dim)
        cuts += [
            _rows(0, group * query_rows, (group + 1) * query_rows, tail, at),
            _rows(1, group * dim, (group + 1) * dim, tail, at + query_rows),
            _rows(2, group * dim, (group + 1) * dim, tail, at + query_rows + dim),
        ]
    return cuts


def _gate_up(shape: Shape, part: int, parts: int) -> list[_Cut]:
    share = shape[0] // parts
    first, last = part * share, (part + 1) * share
    return [_rows(0, first, last, shape[1:], 0), _rows(1, first, last, shape[1:], share)]


def _cuts(table: WeightTable, entry: Entry, shape: Shape, part: int, parts: int) -> list[_Cut]:
    """What part `part` of `parts` tensor-parallel ranks holds of an entry whose first tensor has this shape."""
    match entry:
        case Copy():
            return _copy(entry, shape, part, parts)
        case Vocabulary():
            return _vocabulary(shape, part, parts)
        case FusedQKV():
            return _fused_qkv(table, shape, part, parts)
        case GateUp():
            return _gate_up(shape, part, parts)


def _hf_names(entry: Entry) -> tuple[str, ...]:
    match entry:
        case FusedQKV():
            return (entry.q, entry.k, entry.v)
        case GateUp():
            return (entry.gate, entry.up)
        case Experts():
            return _hf_names(entry.each)
        case _:
            return (entry.hf,)


def checkpoint_names(table: WeightTable) -> list[str]:
    """Every checkpoint tensor that the table speaks of, in model order."""
    names = [name for entry in table.first for name in _hf_names(entry)]
    for i, layer in enumerate(table.layers):
        for entry in layer:
            of_layer = [name.replace("{i}", str(i)) for name in _hf_names(entry)]
            if isinstance(entry, Experts):
                of_layer = [name.replace("{e}", str(e)) for e in range(table.num_experts) for name in of_layer]
            names += of_layer
    return names + [name for entry in table.last for name in _hf_names(entry)]


def _spelled(entry: Entry, spelling: Spelling) -> str:
    name = entry.megatron
    return name if isinstance(name, str) else name[SPELLINGS.index(spelling)]


def find_spelling(table: WeightTable, sizes: ParallelSizes, rank: int, local_names: Collection[str]) -> Spelling:
    """Which of Megatron's two spellings a model uses, from the names of one rank's parameters."""
    entries = table.layers[sizes.layers(sizes.of(rank).pp, 0, len(table.layers))[0]]
    prefix = "0." if sizes.vpp > 1 else ""
    for spelling in SPELLINGS:
        names = [_spelled(entry, spelling) for entry in entries if not isinstance(entry, Experts)]
        if all(prefix + name.replace("{i}", "0") in local_names for name in names):
            return spelling
    raise AssertionError(
        f"rank {rank}'s first layer has the parameters of neither spelling: {sorted(local_names)[:20]}"
    )


@dataclass(frozen=True)
class _Model:
    """Writes the pieces of any rank. Ranks with the same (pp, tp) hold the same dense pieces, with the same
    (pp, ep, etp) the same pieces of experts.
    """

    table: WeightTable
    shapes: dict[str, Shape]
    sizes: ParallelSizes
    spelling: Spelling

    def _layers(self, pp_rank: int) -> Iterator[tuple[int, str, str]]:
        """Of each layer on a stage: its index, the prefix of its chunk, and its number in the chunk."""
        for chunk in range(self.sizes.vpp):
            for local, i in enumerate(self.sizes.layers(pp_rank, chunk, len(self.table.layers))):
                yield i, self._prefix(chunk), str(local)

    def _prefix(self, chunk: int) -> str:
        return f"{chunk}." if self.sizes.vpp > 1 else ""

    def dense(self, pp_rank: int, tp_rank: int) -> list[Piece]:
        """Everything but the experts."""
        sizes, table = self.sizes, self.table
        found: list[Piece] = []
        cuts_of = cache(lambda entry, shape: _cuts(table, entry, shape, tp_rank, sizes.tp))

        def write(entry: Entry, i: str, prefix: str, local: str) -> None:
            names = [name.replace("{i}", i) for name in _hf_names(entry)]
            tensor = prefix + _spelled(entry, self.spelling).replace("{i}", local)
            for source, box, offset, strides in cuts_of(entry, self.shapes[names[0]]):
                found.append(Piece(names[source], box, tensor, offset, strides))

        if pp_rank == 0:
            for entry in table.first:
                write(entry, "", self._prefix(0), "")
        for i, prefix, local in self._layers(pp_rank):
            for entry in table.layers[i]:
                if not isinstance(entry, Experts):
                    write(entry, str(i), prefix, local)
        if pp_rank == sizes.pp - 1:
            tied_head = (table.tied_head,) if table.tied_head is not None and sizes.pp > 1 else ()
            for entry in (*table.last, *tied_head):
                write(entry, "", self._prefix(sizes.vpp - 1), "")
        return found

    def experts(self, pp_rank: int, ep_rank: int, etp_rank: int) -> list[Piece]:
        """The experts' tensors; none on a stage of dense layers."""
        sizes, table = self.sizes, self.table
        count = table.num_experts // sizes.ep
        first = ep_rank * count
        found: list[Piece] = []
        cuts_of = cache(lambda entry, shape: _cuts(table, entry, shape, etp_rank, sizes.etp))
        for i, prefix, local in self._layers(pp_rank):
            for entry in table.layers[i]:
                if not isinstance(entry, Experts):
                    continue
                names = [name.replace("{i}", str(i)).split("{e}") for name in _hf_names(entry)]
                start, end = (prefix + _spelled(entry.each, self.spelling).replace("{i}", local)).split("{e}")
                cuts = cuts_of(entry.each, self.shapes[f"{first}".join(names[0])])
                for source, box, offset, strides in cuts:
                    head, tail = names[source]
                    found += [
                        Piece(f"{head}{first + e}{tail}", box, f"{start}{e}{end}", offset, strides)
                        for e in range(count)
                    ]
        return found


def holdings(
    table: WeightTable, checkpoint_shapes: dict[str, Shape], sizes: ParallelSizes, spelling: Spelling
) -> list[Holding]:
    """What all ranks hold, each list of pieces once with all the ranks that hold it.

    A rank is in one holding of dense tensors and, where its stage has experts, in one of experts.

    Args:
        table: the family's weight table.
        checkpoint_shapes: shape of every checkpoint tensor.
        spelling: Megatron's names of the model, see `find_spelling`.
    """
    model = _Model(table, checkpoint_shapes, sizes, spelling)
    dense, experts = defaultdict(list), defaultdict(list)
    for rank in range(sizes.world_size):
        at = sizes.of(rank)
        dense[at.pp, at.tp].append(rank)
        experts[at.pp, at.ep, at.etp].append(rank)
    found = [Holding(tuple(ranks), model.dense(*place)) for place, ranks in dense.items()]
    if table.num_experts:
        found += [Holding(tuple(ranks), model.experts(*place)) for place, ranks in experts.items()]
    return [holding for holding in found if holding.pieces]


def pieces_of(
    table: WeightTable, checkpoint_shapes: dict[str, Shape], sizes: ParallelSizes, rank: int, spelling: Spelling
) -> list[Piece]:
    """What one rank holds; arguments as for `holdings`."""
    model, at = _Model(table, checkpoint_shapes, sizes, spelling), sizes.of(rank)
    return model.dense(at.pp, at.tp) + model.experts(at.pp, at.ep, at.etp)


@dataclass(frozen=True)
class ShardedModel:
    """The parameters of one model on this rank, and how all ranks' parameters make up the checkpoint."""

    layout: Layout
    table: WeightTable
    checkpoint_shapes: dict[str, Shape]
    tensors: dict[str, torch.nn.Parameter]  # by Megatron name; the objects, since DDP moves their storage

    @cached_property
    def spelling(self) -> Spelling:
        """Megatron's names of this model; every rank finds the same."""
        return find_spelling(self.table, self.layout.sizes, self.layout.rank, self.tensors.keys())

    def pieces_of(self, rank: int) -> list[Piece]:
        """What `rank` holds."""
        return pieces_of(self.table, self.checkpoint_shapes, self.layout.sizes, rank, self.spelling)

    @cached_property
    def pieces(self) -> list[Piece]:
        """What this rank holds."""
        return self.pieces_of(self.layout.rank)

    @cached_property
    def holdings(self) -> list[Holding]:
        """What every rank holds."""
        return holdings(self.table, self.checkpoint_shapes, self.layout.sizes, self.spelling)

    @cached_property
    def sources(self) -> dict[int, list[Piece]]:
        """The pieces that each rank contributes to one whole checkpoint: each box comes from one rank."""
        taken: set[tuple] = set()
        chosen: dict[int, list[Piece]] = defaultdict(list)
        for holding in self.holdings:
            own = [p for p in holding.pieces if (p.name, p.box) not in taken]
            taken |= {(p.name, p.box) for p in own}
            chosen[min(holding.ranks)] += own
        return dict(chosen)

    @cached_property
    def metas(self) -> list[TensorMeta]:
        """Every checkpoint tensor as it travels: in model order, in the parameters' own type."""
        dtype = str(next(iter(self.tensors.values())).dtype).removeprefix("torch.")
        return [TensorMeta(name, self.checkpoint_shapes[name], dtype) for name in checkpoint_names(self.table)]

    @cached_property
    def padded(self) -> list[str]:
        """The local tensors whose last rows may be padding."""
        words = [e for e in (*self.table.first, *self.table.last, self.table.tied_head) if isinstance(e, Vocabulary)]
        endings = tuple(_spelled(word, self.spelling) for word in words)
        return [name for name in self.tensors if name.endswith(endings)]

    def check_covered(self) -> None:
        """Every element of every tensor, local or of the checkpoint, is in as many pieces as it should be.

        A local element is in one piece, or in none if it is padding; a checkpoint's is in `sources` once.

        Raises:
            ValueError: the checkpoint's shapes do not make up this model (config.json and safetensors disagree), on
                every rank that has a part in such a tensor.
        """
        problem = "the checkpoint's tensors do not fit its config.json:"
        scalars = [name for name, shape in self.checkpoint_shapes.items() if not shape]
        if scalars:
            raise ValueError(f"{problem} {scalars[0]} has no dimension")
        covered = Counter()
        for piece in self.pieces:
            sizes, place = piece.sizes, self.tensors[piece.tensor].shape
            covered[piece.tensor] += piece.numel if len(sizes) == len(place) and sizes[1:] == place[1:] else 0
        for name, tensor in self.tensors.items():
            fits = covered[name] <= tensor.numel() if name in self.padded else covered[name] == tensor.numel()
            if not fits:
                from_checkpoint = {p.name: self.checkpoint_shapes[p.name] for p in self.pieces if p.tensor == name}
                raise ValueError(
                    f"{problem} {from_checkpoint or 'nothing'} give {covered[name]} of the {tensor.numel()} elements "
                    f"of {name} on rank {self.layout.rank}"
                )
        used = Counter()
        for piece in (p for own in self.sources.values() for p in own):
            shape = self.checkpoint_shapes[piece.name]
            inside = len(shape) == len(piece.box) and all(b[1] <= n for b, n in zip(piece.box, shape, strict=True))
            used[piece.name] += piece.numel if inside else 0
        for name in checkpoint_names(self.table):
            shape = self.checkpoint_shapes[name]
            if used[name] != prod(shape):
                raise ValueError(
                    f"{problem} {name} has the shape {list(shape)}, and {used[name]} of its {prod(shape)} elements "
                    "have a place in the model"
                )
