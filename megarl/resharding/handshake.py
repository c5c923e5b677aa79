"""What trainer and engine workers tell each other once, when the bridge connects (JSON by msgspec, over a TCPStore).

Each worker says hello with the digest of its traced layout; each distinct layout travels once. The trainer answers
every worker with its program: which bytes arrive in which round and where each box goes.
"""

from __future__ import annotations

import hashlib

import msgspec

from megarl.resharding.pieces import Piece, TensorMeta
from megarl.resharding.plan import whole
from megarl.resharding.vllm_layout import EngineLayout

STAGING = "whole:"  # a tensor that goes through the loader is first put together under this name


class Hello(msgspec.Struct):
    """A worker's first words."""

    vllm: str  # version
    layout: str  # digest
    node: str  # host name
    device: str  # `identity` of resharding/transport.py
    error: str = ""  # why this worker cannot take part


class Round(msgspec.Struct, array_like=True):
    """One buffer of a worker."""

    parts: list[tuple[int, int]]  # (member of the link, bytes), in the order in which they lie in the buffer
    takes: list[Piece]  # the boxes in the buffer, one after another


class Program(msgspec.Struct):
    """What one worker does at every sync. With `error`, nothing: the trainer has refused."""

    error: str = ""
    digest: str = ""  # of the trainer's plan: stated again at every sync
    rounds: list[Round] = []
    places: list[int] = []  # of this worker's pieces in the audit's vector, then of its whole tensors
    whole: list[TensorMeta] = []
    members: int = 0  # of the link to the trainer: its sending ranks, then the engine's workers
    member: int = 0  # this worker's own number there
    upstream: str = "trainer"  # "trainer": over the link; "engine": from the replica before; "memory": shared memory
    has_downstream: bool = False  # another replica gets its weights from this one
    workers: int = 0  # of this replica
    backend: str = "gloo"
    memory: dict = {}  # where the shared buffers are, with upstream "memory"


def digest_of(layout: EngineLayout) -> str:
    """Equal digests: the worker holds the same boxes in the same places."""
    return hashlib.blake2b(msgspec.json.encode(layout), digest_size=16).hexdigest()


def destination_pieces(layout: EngineLayout, metas: dict[str, TensorMeta]) -> list[Piece]:
    """A worker's pieces as the plan fills them: its own, and the whole of what its loader has to place."""
    return layout.pieces + [whole(name, metas[name].shape, STAGING + name) for name in layout.whole]
