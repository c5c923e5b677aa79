"""A plan says which box of which tensor goes from which process to which: any source layout to any destination layout.

Load, sync, export and convert are this one thing with other ends. Boxes of the destination are intersected with those
of the sources; among equal sources the nearest and then the least busy one serves; transfers are ordered so that the
destination fills one module after another, and cut into rounds in which no process sends or receives more than a
bucket. Every process that plans from the same layouts gets the same plan, so that nothing but its digest is exchanged.
"""

from __future__ import annotations

import gc
import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

from megarl.resharding.pieces import Box, Holding, Piece, TensorMeta

Distance = Callable[[int, int], int]  # (source, destination) -> 0 same device, 1 same node, 2 other; less is nearer


@contextmanager
def no_garbage_collection():
    """Planning makes hundreds of thousands of small tuples and no cycle: the collector would look at them in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Transfer(NamedTuple):
    """One box on its way: `give` in the source's local tensor, `take` in the destination's; both have the same box."""

    source: int
    destination: int
    give: Piece
    take: Piece
    nbytes: int  # on the wire
    piece_box: Box  # of the destination's piece that this is the whole or a part of


@dataclass(frozen=True)
class Plan:
    """Transfers in rounds. Within a round a process handles its peers in ascending order, each peer's in plan order."""

    rounds: list[list[Transfer]]

    def __iter__(self):
        return (transfer for transfers in self.rounds for transfer in transfers)

    @cached_property
    def digest(self) -> str:
        """Equal digests: equal plans."""
        found = hashlib.blake2b(digest_size=16)
        kinds: dict[tuple, int] = {}  # the few boxes and strides that there are, numbered as they come
        for transfers in filter(None, self.rounds):
            # By columns: a large plan has a million transfers.
            sources, destinations, gives, takes, sizes, _ = zip(*transfers)
            names, boxes, from_tensors, give_offsets, give_strides = zip(*gives)
            _, _, to_tensors, take_offsets, take_strides = zip(*takes)
            for column in (names, from_tensors, to_tensors):
                found.update("\n".join(column).encode())
            numbered = [kinds.setdefault(kind, len(kinds)) for kind in zip(boxes, give_strides, take_strides)]
            for column in (sources, destinations, sizes, give_offsets, take_offsets, numbered):
                found.update(array("q", column))
            found.update(b"end of a round")
        found.update(repr(list(kinds)).encode())
        return found.hexdigest()

    def egress(self) -> dict[int, int]:
        """Bytes that each source sends (none to itself)."""
        sent = defaultdict(int)
        for transfer in self:
            if transfer.source != transfer.destination:
                sent[transfer.source] += transfer.nbytes
        return dict(sent)

    def ingress(self) -> dict[int, int]:
        """Bytes that each destination takes, its own included."""
        taken = defaultdict(int)
        for transfer in self:
            taken[transfer.destination] += transfer.nbytes
        return dict(taken)

    def sends(self, rank: int) -> list[dict[int, list[Transfer]]]:
        """For each round: destination -> what `rank` sends there."""
        return [group_by([t for t in transfers if t.source == rank], 1) for transfers in self.rounds]

    def receives(self, rank: int) -> list[dict[int, list[Transfer]]]:
        """For each round: source -> what `rank` takes from it."""
        return [group_by([t for t in transfers if t.destination == rank], 0) for transfers in self.rounds]


def group_by(transfers: Iterable[Transfer], end: int) -> dict[int, list[Transfer]]:
    """Transfers by their source (`end` 0) or destination (1), in ascending order."""
    grouped: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        grouped[transfer[end]].append(transfer)
    return dict(sorted(grouped.items()))


def crop(piece: Piece, box: Box) -> Piece:
    """The part of a piece that holds `box`, which lies within it."""
    name, held, tensor, offset, strides = piece
    if held == box:
        return piece
    for (start, _), (inner, _), stride in zip(held, box, strides):
        offset += (inner - start) * stride
    return Piece(name, box, tensor, offset, strides)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box; None when there is none."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _split(box: Box, itemsize: int, limit: int) -> list[Box]:
    """Cut a box along its longest dimensions into boxes of at most `limit` bytes."""
    parts = -(-_numel(box) * itemsize // limit)
    if parts <= 1:
        return [box]
    sizes = [stop - start for start, stop in box]
    dim = 0 if sizes[0] >= parts or sizes[0] == max(sizes) else sizes.index(max(sizes))
    step = max(1, sizes[dim] // parts)
    start, stop = box[dim]
    cut = []
    for at in range(start, stop, step):
        part = (*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :])
        cut += _split(part, itemsize, limit) if sizes[dim] > 1 else [part]
    return cut


def whole(name: str, shape: tuple[int, ...], tensor: str | None = None) -> Piece:
    """A checkpoint tensor that lies whole and contiguous in a local tensor: of its own name unless one is given."""
    strides, width = [], 1
    for size in reversed(shape):
        strides.append(width)
        width *= size
    return Piece(name, tuple((0, n) for n in shape), tensor or name, 0, tuple(reversed(strides)))


class Sources:
    """Where each box of each checkpoint tensor can be had: the boxes, and the holders of exactly each of them."""

    def __init__(self, holdings: Iterable[Holding]):
        found: dict[str, dict[Box, list[tuple[tuple[int, ...], Piece]]]] = {}
        for holding in holdings:
            ranks = holding.ranks
            for piece in holding.pieces:
                found.setdefault(piece.name, {}).setdefault(piece.box, []).append((ranks, piece))
        self.held = {name: (tuple(boxes), list(boxes.values())) for name, boxes in found.items()}

    def of(self, piece: Piece) -> tuple[tuple[Box, ...], list[list[tuple[tuple[int, ...], Piece]]]]:
        """The boxes of a piece's checkpoint tensor, and of each box (ranks, their piece) for those who hold it.

        Raises:
            ValueError: nobody holds it.
        """
        if piece.name not in self.held:
            raise ValueError(f"{piece.name} is asked for, and no source holds it")
        return self.held[piece.name]


def _parts(wanted: Box, boxes: tuple[Box, ...], itemsize: int, limit: int | None) -> list[tuple[int, Box, int]] | None:
    """What makes up a box: (which of the sources' boxes, part of at most `limit` bytes, its bytes).

    None when the sources' boxes do not make it up once.
    """
    if wanted in boxes:
        common = [(boxes.index(wanted), wanted)]
    else:
        common = [(i, inner) for i, box in enumerate(boxes) if (inner := intersect(wanted, box))]
        if sum(_numel(inner) for _, inner in common) != _numel(wanted):
            return None
    return [
        (i, part, _numel(part) * itemsize)
        for i, inner in common
        for part in ((inner,) if limit is None else _split(inner, itemsize, limit))
    ]


def _numel(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


@no_garbage_collection()
def make_plan(
    sources: Sources,
    destinations: list[Holding],
    metas: dict[str, TensorMeta],
    bucket_bytes: int | None = None,
    distance: Distance | None = None,
) -> Plan:
    """Every piece of every destination, from the nearest and least busy source of each of its boxes.

    Args:
        sources: who holds what.
        destinations: who is to hold what; each of a holding's ranks gets its own copy.
        metas: every checkpoint tensor as it travels, in the order in which sources would rather read.
        bucket_bytes: what a process sends or receives in one round at most; None: everything in one round.
        distance: how far a source is from a destination; left out, its own tensors are nearest and all others equal.

    Raises:
        ValueError: the sources do not hold what a destination asks for.
    """
    load: dict[int, int] = defaultdict(int)
    # The experts of all layers are alike, and so are the workers: boxes are compared once for each pattern of them.
    parts_of, nearest = cache(_parts), cache(partial(_nearest, distance))
    transfers: list[Transfer] = []
    for destination, piece in _in_order(destinations, metas):
        boxes, holders = sources.of(piece)
        parts = parts_of(piece.box, boxes, metas[piece.name].itemsize, bucket_bytes)
        if parts is None:
            raise ValueError(f"the sources hold {sorted(boxes)} of {piece.name}, which do not make up {piece.box} once")
        for place, part, nbytes in parts:
            rank, held = _choose(holders[place], destination, load, nearest)
            if rank != destination:
                load[rank] += nbytes
            transfers.append(Transfer(rank, destination, crop(held, part), crop(piece, part), nbytes, piece.box))
    return Plan([transfers] if bucket_bytes is None else _rounds(transfers, bucket_bytes))


def _nearest(distance: Distance | None, ranks: tuple[int, ...], destination: int) -> tuple[int, list[int]]:
    """(how far the nearest of these ranks are, which they are, in ascending order)."""
    far = [rank != destination if distance is None else distance(rank, destination) for rank in ranks]
    return min(far), sorted(rank for rank, away in zip(ranks, far) if away == min(far))


def _choose(holders, destination: int, load: dict[int, int], nearest) -> tuple[int, Piece]:
    """Of all ranks that hold a box the nearest, of these the least busy, of these the lowest; and its piece."""
    best, best_key = None, None
    for ranks, held in holders:
        far, near = nearest(ranks, destination)
        rank = min(near, key=load.__getitem__)
        if len(holders) == 1:
            return rank, held
        key = (far, load[rank], rank)
        if best_key is None or key < best_key:
            best, best_key = (rank, held), key
    return best


def _in_order(destinations: list[Holding], metas: dict[str, TensorMeta]) -> list[tuple[int, Piece]]:
    """(rank, piece), module by module: all that goes into one local module comes together, modules in model order.

    A receiver then holds one unfinished module at a time, whatever order the checkpoint's names have.
    """
    place = {name: i for i, name in enumerate(metas)}
    module_of = cache(lambda tensor: tensor.rpartition(".")[0])
    first: dict[str, int] = {}  # of each destination module the first checkpoint tensor that goes into it
    for holding in destinations:
        for piece in holding.pieces:
            module, at = module_of(piece.tensor), place[piece.name]
            if first.setdefault(module, at) > at:
                first[module] = at
    ranks = sorted((rank, number) for number, holding in enumerate(destinations) for rank in holding.ranks)
    wanted = [(rank, piece) for rank, number in ranks for piece in destinations[number].pieces]
    keys = [first[module_of(piece.tensor)] * len(place) + place[piece.name] for _, piece in wanted]
    return [wanted[i] for i in sorted(range(len(wanted)), key=keys.__getitem__)]


def _rounds(transfers: list[Transfer], bucket_bytes: int) -> list[list[Transfer]]:
    """Each transfer goes to the first round, not before its destination's last one, with room at both ends."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    into: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)
    rounds: list[list[Transfer]] = []
    for transfer in transfers:
        source, destination, nbytes = transfer.source, transfer.destination, transfer.nbytes
        at = last[destination]
        while (into[destination, at] and into[destination, at] + nbytes > bucket_bytes) or (
            out[source, at] and out[source, at] + nbytes > bucket_bytes
        ):
            at += 1
        into[destination, at] += nbytes
        out[source, at] += nbytes
        last[destination] = at
        while len(rounds) <= at:
            rounds.append([])
        rounds[at].append(transfer)
    return rounds
