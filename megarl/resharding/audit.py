"""The audit of a sync: one number for each box of each checkpoint tensor, computed on both sides and compared.

    checksum(x) = sum over elements of bits(x[i, j]) * odd_0(i) * odd_1(j)     modulo 2^64

where i and j are the element's place in the whole checkpoint tensor, bits() its bit pattern as a signed integer in the
type that travels, and odd_d pseudo-random odd numbers (splitmix64 of the place, with a salt for each dimension). An
odd factor is invertible modulo 2^64, so one changed element always changes the sum; dropped, stale, moved, swapped or
transposed boxes change it but for a chance of about 2^-64. Sums of disjoint boxes add up, so every process looks at
its own memory once, and 8 bytes a box travel. It proves delivery into the raw parameters; what an engine makes of them
afterwards (prepacked copies, quantisation) is proven by parity (`resharding/parity.py`).
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch

from megarl.resharding.pieces import Box, Piece, TensorMeta
from megarl.resharding.plan import Plan

# Elements widened to 64 bits at a time: half a MiB stays in a core's cache, 32 MiB keeps a GPU busy.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
_SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0)  # digits of pi
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=64)
def _odd(dim: int, count: int, device: torch.device) -> torch.Tensor:
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15) + _signed(_SALTS[dim])
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def odd(dim: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """[stop - start] int64, the factors of places start..stop along dimension `dim`."""
    size = 1 << max(10, (stop - 1).bit_length())
    return _odd(dim, size, device)[start:stop]


def checksum(values: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """The sum over one box of a checkpoint tensor, a scalar int64 on the values' device.

    Args:
        values: the box's elements, any strides, as many dimensions as the box (1 to 3).
        box: where they stand in the checkpoint tensor.
        dtype: the type that travels; other values are cast to it first.
    """
    rows = values.shape[0]
    per_row = values.numel() // rows
    step = max(1, _CHUNK[values.device.type] // max(per_row, 1))
    factors = [odd(d, start, stop, values.device) for d, (start, stop) in enumerate(box)]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    integers = _INTEGERS[dtype.itemsize]
    for first in range(0, rows, step):
        part = values[first : first + step].to(dtype).contiguous().view(integers).to(torch.int64)
        for factor in reversed(factors[1:]):
            part = part.mul_(factor).sum(-1)
        total += part.mul_(factors[0][first : first + step]).sum()
        del part  # before the next one is made
    return total


class Ledger:
    """The boxes that a plan delivers, each with a place in one vector of sums; the same on every process."""

    def __init__(self, plan: Plan):
        self.places: dict[tuple[str, Box], int] = {}  # (checkpoint tensor, box of a destination's piece)
        self._counted: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        first_to_take: list[int] = []
        uncounted: list[int] = []  # elements of each box
        for transfer in plan:
            key = (transfer.give.name, transfer.piece_box)
            place = self.places.setdefault(key, len(self.places))
            if place == len(first_to_take):
                first_to_take.append(transfer.destination)
                uncounted.append(prod(stop - start for start, stop in transfer.piece_box))
            # Several destinations may take the same box from several sources, and one of them may put it in two places;
            # it is counted once, and each place has to arrive at the same number.
            if first_to_take[place] == transfer.destination and uncounted[place]:
                self._counted[transfer.source].append((place, transfer.give))
                uncounted[place] -= transfer.give.numel

    def sums(self, rank: int, tensors: Mapping[str, torch.Tensor], metas: Mapping[str, TensorMeta]) -> torch.Tensor:
        """A source's share of every sum, int64 [len(places)] on the CPU; the shares of all sources add up."""
        vector = torch.zeros(len(self.places), dtype=torch.int64)
        counted = self._counted.get(rank, [])
        if counted:
            shares = [
                checksum(piece.view(tensors[piece.tensor]), piece.box, getattr(torch, metas[piece.name].dtype))
                for _, piece in counted
            ]
            vector.index_add_(0, torch.tensor([place for place, _ in counted]), torch.stack(shares).cpu())
        return vector

    def differences(self, expected: torch.Tensor, found: torch.Tensor, places: torch.Tensor) -> list[str]:
        """What a destination with pieces at `places` [n] did not get right: one line a box, in plan order.

        Args:
            expected: [len(places of the ledger)], the sum of all sources' shares.
            found: [n], the destination's own sums.
        """
        keys = list(self.places)
        lines = []
        for i in torch.nonzero(expected[places] != found).flatten().tolist():
            name, box = keys[int(places[i])]
            here = "x".join(f"{start}:{stop}" for start, stop in box)
            lines.append(f"{name}[{here}]: sent {_hex(expected[places[i]])}, holds {_hex(found[i])}")
        return lines


def _hex(value: torch.Tensor) -> str:
    return f"{int(value) & ((1 << 64) - 1):016x}"
