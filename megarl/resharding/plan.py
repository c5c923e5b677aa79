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
from functools import cached_property
from typing import NamedTuple

from megarl.resharding.pieces import Box, Holding, Piece, TensorMeta

Distance = Callable[[int, int], int]  # (source, destination) -> 0 same device, 1 same node, 2 other; less is nearer


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
        names, numbers = [], array("q")
        for number, transfers in enumerate(self.rounds):
            for source, destination, give, take, nbytes, _ in transfers:
                names += (give.name, give.tensor, take.tensor)
                numbers.extend((number, source, destination, nbytes, give.offset, take.offset))
                numbers.extend(give.strides)
                numbers.extend(take.strides)
                for ends in give.box:
                    numbers.extend(ends)
        found = hashlib.blake2b("\n".join(names).encode(), digest_size=16)
        found.update(numbers.tobytes())
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
    offset = piece.offset
    for (start, _), (inner, _), stride in zip(piece.box, box, piece.strides):
        offset += (inner - start) * stride
    return Piece(piece.name, box, piece.tensor, offset, piece.strides)


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
    """Where each box of each checkpoint tensor can be had: box -> the holders of exactly this box."""

    def __init__(self, holdings: Iterable[Holding]):
        self.boxes: dict[str, dict[Box, list[tuple[tuple[int, ...], Piece]]]] = {}
        for holding in holdings:
            ranks = holding.ranks
            for piece in holding.pieces:
                self.boxes.setdefault(piece.name, {}).setdefault(piece.box, []).append((ranks, piece))

    def covering(self, piece: Piece) -> list[tuple[Box, list[tuple[tuple[int, ...], Piece]]]]:
        """The boxes that make up `piece`, each with its holders.

        Raises:
            ValueError: the sources lack a part of it, or hold overlapping boxes.
        """
        held = self.boxes.get(piece.name)
        if held is None:
            raise ValueError(f"{piece.name} is asked for, and no source holds it")
        exact = held.get(piece.box)
        if exact is not None:
            return [(piece.box, exact)]
        found = [(common, holders) for box, holders in held.items() if (common := intersect(piece.box, box))]
        if sum(_numel(box) for box, _ in found) != piece.numel:
            raise ValueError(f"the sources hold {sorted(held)} of {piece.name}, which do not make up {piece.box} once")
        return found


def _numel(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


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
        distance: how far a source is from a destination; left out, all are equally near.

    Raises:
        ValueError: the sources do not hold what a destination asks for.
    """
    load: dict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    for destination, piece in _in_order(destinations, metas):
        itemsize = metas[piece.name].itemsize
        for box, holders in sources.covering(piece):
            parts = (box,) if bucket_bytes is None else _split(box, itemsize, bucket_bytes)
            for part in parts:
                nbytes = _numel(part) * itemsize
                rank, held = _choose(holders, destination, load, distance)
                if rank != destination:
                    load[rank] += nbytes
                give = held if held.box == part else crop(held, part)
                take = piece if piece.box == part else crop(piece, part)
                transfers.append(Transfer(rank, destination, give, take, nbytes, piece.box))
    return Plan([transfers] if bucket_bytes is None else _rounds(transfers, bucket_bytes))


def _choose(holders, destination: int, load: dict[int, int], distance: Distance | None) -> tuple[int, Piece]:
    best, best_key = None, None
    for ranks, piece in holders:
        for rank in ranks:
            far = 0 if distance is None else distance(rank, destination)
            key = (far, load[rank], rank)
            if best_key is None or key < best_key:
                best, best_key = (rank, piece), key
    return best


def _in_order(destinations: list[Holding], metas: dict[str, TensorMeta]) -> list[tuple[int, Piece]]:
    """(rank, piece), module by module: all that goes into one local module comes together, modules in model order.

    A receiver then holds one unfinished module at a time, whatever order the checkpoint's names have.
    """
    place = {name: i for i, name in enumerate(metas)}
    first: dict[str, int] = {}  # of each destination module the first checkpoint tensor that goes into it
    for holding in destinations:
        for piece in holding.pieces:
            module = piece.tensor.rpartition(".")[0]
            at = place[piece.name]
            if first.get(module, at) >= at:
                first[module] = at
    keyed = []
    for number, holding in enumerate(destinations):
        for index, piece in enumerate(holding.pieces):
            module = piece.tensor.rpartition(".")[0]
            keyed += [(first[module], place[piece.name], rank, number, index) for rank in holding.ranks]
    keyed.sort()
    return [(rank, destinations[number].pieces[index]) for _, _, rank, number, index in keyed]


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
