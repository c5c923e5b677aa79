"""A communicator between rank 0 and one engine's workers, apart from any other process group; both sides use it."""

from datetime import timedelta

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)


def host(port: int) -> dist.TCPStore:
    """The meeting point that rank 0 opens on the loopback interface; port 0 takes a free one (`.port` tells which).

    Raises:
        ValueError: the port is taken.
    """
    try:
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    except RuntimeError as error:  # torch has no kind of its own for a taken port
        raise ValueError(
            f"sync.port={port} cannot be opened ({str(error).splitlines()[0]}); choose another, or 0 for any"
        ) from error


def visit(address: str, port: int) -> dist.TCPStore:
    """The same meeting point, seen from an engine worker."""
    return dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)


class Link:
    """One communicator: rank 0 is the trainer's, ranks 1.. are the engine's workers."""

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        self.store = store  # kept alive: the group speaks through it
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)

    def send(self, flat: torch.Tensor) -> None:
        """Rank 0: a CPU buffer to every worker."""
        self.group.broadcast(flat, 0).wait()

    def receive(self, nbytes: int) -> torch.Tensor:
        """A worker: the next buffer, uint8 [nbytes], on the CPU."""
        flat = torch.empty(nbytes, dtype=torch.uint8)
        self.group.broadcast(flat, 0).wait()
        return flat


def join(store: dist.TCPStore, rank: int, world_size: int) -> Link:
    """Wait until all `world_size` members have come."""
    return Link(store, rank, world_size)
