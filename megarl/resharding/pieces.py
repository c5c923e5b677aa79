"""A piece says: this box of this checkpoint tensor lies in this strided view of this local tensor.

A layout is the list of pieces that one process holds. Names and shapes are those of the Hugging Face checkpoint, so any
two layouts, files included, meet in the same coordinates. This file imports torch only: engine workers use it too.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """Example: Piece("model.layers.3.self_attn.q_proj.weight", ((0, 512), (0, 1024)), "...linear_qkv.weight",
    offset=0, strides=(1024, 1))
    """

    name: str  # checkpoint tensor
    box: Box  # half-open range per dimension of the checkpoint tensor
    tensor: str  # local tensor
    offset: int  # elements from the local tensor's start to the box's first element
    strides: tuple[int, ...]  # of the local view, in elements, one per dimension of the box

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The strided view of the (contiguous) local tensor that holds this box; no gradient flows through it."""
        assert local.is_contiguous(), f"{self.tensor} is not contiguous"
        return torch.as_strided(local.detach(), self.sizes, self.strides, local.storage_offset() + self.offset)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same box of the whole checkpoint tensor."""
        return whole[tuple(slice(start, stop) for start, stop in self.box)]


@dataclass(frozen=True)
class Holding:
    """Each of these processes holds these same pieces."""

    ranks: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True)
class TensorMeta:
    """A whole checkpoint tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"

    @cached_property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def buckets(metas: list[TensorMeta], limit_bytes: int) -> list[list[TensorMeta]]:
    """Cut a list of tensors, in order, into runs of at most `limit_bytes`; a larger tensor is a bucket of its own."""
    runs: list[list[TensorMeta]] = []
    room = 0
    for meta in metas:
        if not runs or meta.nbytes > room:
            runs.append([])
            room = limit_bytes
        runs[-1].append(meta)
        room -= meta.nbytes
    return runs


def unpack(bucket: list[TensorMeta], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket as views of its flat uint8 buffer (all tensors of a run share one dtype's alignment)."""
    views, at = {}, 0
    for meta in bucket:
        dtype = getattr(torch, meta.dtype)
        views[meta.name] = flat[at : at + meta.nbytes].view(dtype).view(meta.shape)
        at += meta.nbytes
    return views
