"""How the buffers of a plan move: between trainer ranks, from trainer ranks to engine workers, from engine to engine.

Both sides use this file; it knows bytes and peers, not tensors of a model. A communicator serves one engine and no
other, and can be aborted from either side: a dead engine never blocks the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.resharding.pieces import TensorMeta
from megarl.resharding.plan import Plan, Transfer

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
FORMING = timedelta(minutes=2)  # all members of a communicator have been told to come when the first one waits


def address() -> str:
    """Where the engine workers and other ranks find rank 0: the loopback interface when all ranks are on one node."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return LOOPBACK if world <= local or "MASTER_ADDR" not in os.environ else os.environ["MASTER_ADDR"]


def ranks_per_node(world_size: int) -> int:
    """How many of the launcher's ranks share a node; without a launcher all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def identity(device: torch.device) -> str:
    """The physical device, the same text in every process that uses it: a GPU's UUID, or the CPU's host name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"cpu of {socket.gethostname()}"


def host(port: int) -> dist.TCPStore:
    """The meeting point that rank 0 opens; port 0 takes a free one (`.port` tells which).

    Raises:
        ValueError: the port is taken.
    """
    try:
        return dist.TCPStore(address(), port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    except RuntimeError as error:  # torch has no kind of its own for a taken port
        raise ValueError(
            f"sync.port={port} cannot be opened ({str(error).splitlines()[0]}); choose another, or 0 for any"
        ) from error


def visit(where: str, port: int) -> dist.TCPStore:
    """The same meeting point, seen from another process."""
    return dist.TCPStore(where, port, is_master=False, timeout=TIMEOUT)


class Link:
    """One communicator over gloo (buffers on the CPU) or NCCL (buffers on the GPU), apart from any process group."""

    def __init__(self, store: dist.TCPStore, name: str, rank: int, size: int, backend: str = "gloo"):
        """Wait until all `size` members have come. `name` tells communicators of one store apart."""
        self.store = store  # kept alive: the communicator speaks through it
        self.backend = backend
        prefixed = dist.PrefixStore(f"link/{name}", store)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            interface = {} if address() != LOOPBACK else {"hostname": LOOPBACK}
            options._devices = [
                dist.ProcessGroupGloo.create_device(**interface)
                if interface
                else dist.ProcessGroupGloo.create_default_device()
            ]
            options._timeout = FORMING
            self.group = dist.ProcessGroupGloo(prefixed, rank, size, options)
            self.group.set_timeout(TIMEOUT)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self.group = dist.ProcessGroupNCCL(prefixed, rank, size, options)

    @property
    def device(self) -> torch.device:
        """Where buffers have to be."""
        return torch.device("cpu" if self.backend == "gloo" else torch.cuda.current_device())

    def exchange(
        self, sends: Iterable[tuple[int, torch.Tensor]] = (), receives: Iterable[tuple[int, torch.Tensor]] = ()
    ) -> Callable[[], None]:
        """Start sending and receiving (peer, buffer) pairs; the returned function waits until all are done.

        Raises RuntimeError, then or there, when a peer is gone.
        """
        if self.group is None:
            raise RuntimeError("this communicator was aborted")
        if self.backend == "nccl":
            self.group._start_coalescing(self.device)
            for peer, buffer in sends:
                self.group.send([buffer], peer, 0)
            for peer, buffer in receives:
                self.group.recv([buffer], peer, 0)
            work = [self.group._end_coalescing(self.device)]
        else:
            work = [self.group.send([buffer], peer, 0) for peer, buffer in sends]
            work += [self.group.recv([buffer], peer, 0) for peer, buffer in receives]

        def wait() -> None:
            for one in work:
                one.wait()

        return wait

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        self.exchange(sends=[(peer, buffer.to(self.device))])()

    def receive(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The peer's next buffer, on the CPU."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self.exchange(receives=[(peer, buffer)])()
        return buffer.cpu()

    def broadcast(self, buffer: torch.Tensor) -> None:
        """From member 0 to all; on the others the buffer is filled."""
        if self.group is None:
            raise RuntimeError("this communicator was aborted")
        self.group.broadcast(buffer, 0).wait()

    def abort(self) -> None:
        """Break the communicator: every member's pending and later calls fail at once instead of waiting."""
        if self.backend == "nccl" and self.group is not None:
            with contextlib.suppress(RuntimeError):  # already broken from the other side
                self.group.abort()
        self.group = None  # gloo closes its connections when the group goes; its own abort() leaves them open


def nbytes(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.nbytes for transfer in transfers)


def pack(
    transfers: list[Transfer], tensors: Mapping[str, torch.Tensor], metas: Mapping[str, TensorMeta], out: torch.Tensor
) -> None:
    """Write what a source gives into a flat uint8 buffer, cast to the types that travel, one box after another."""
    at = 0
    for transfer in transfers:
        give = transfer.give
        dtype = getattr(torch, metas[give.name].dtype)
        values = give.view(tensors[give.tensor])
        part = out[at : at + transfer.nbytes]
        if part.storage_offset() % dtype.itemsize == 0:
            part.view(dtype).view(give.sizes).copy_(values)
        else:
            part.copy_(values.to(dtype).contiguous().view(-1).view(torch.uint8))
        at += transfer.nbytes


def unpack(sizes: list[tuple[int, ...]], dtypes: list[torch.dtype], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The boxes of a flat uint8 buffer, one after another, as views where their alignment allows it."""
    at = 0
    for shape, dtype in zip(sizes, dtypes, strict=True):
        count = dtype.itemsize
        for size in shape:
            count *= size
        part = buffer[at : at + count]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        yield part.view(dtype).view(shape)
        at += count


def exchange_among_ranks(
    plan: Plan,
    rank: int,
    give: Mapping[str, torch.Tensor],
    take: Mapping[str, torch.Tensor],
    metas: Mapping[str, TensorMeta],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Run a plan whose sources and destinations are ranks of `group`. Collective over those that it names.

    Args:
        give: this rank's tensors as a source.
        take: this rank's tensors as a destination, by the names of the plan's `take` pieces.
    """
    for sends, receives in zip(plan.sends(rank), plan.receives(rank), strict=True):
        for transfer in sends.pop(rank, []):
            transfer.take.view(take[transfer.take.tensor]).copy_(transfer.give.view(give[transfer.give.tensor]))
        receives.pop(rank, None)
        operations, arrived = [], []
        for peer, transfers in sends.items():
            buffer = torch.empty(nbytes(transfers), dtype=torch.uint8, device=device)
            pack(transfers, give, metas, buffer)
            operations.append(dist.P2POp(dist.isend, buffer, peer, group))
        for peer, transfers in receives.items():
            buffer = torch.empty(nbytes(transfers), dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, buffer, peer, group))
            arrived.append((transfers, buffer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for transfers, buffer in arrived:
            scatter(transfers, buffer, take, metas)


def scatter(
    transfers: list[Transfer],
    buffer: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    metas: Mapping[str, TensorMeta],
) -> None:
    """Put a buffer's boxes where a destination takes them."""
    dtypes = [getattr(torch, metas[transfer.take.name].dtype) for transfer in transfers]
    for transfer, values in zip(
        transfers, unpack([transfer.take.sizes for transfer in transfers], dtypes, buffer), strict=True
    ):
        transfer.take.view(tensors[transfer.take.tensor]).copy_(values)
