"""Buffers that a trainer rank and an engine worker on the same device both see: the colocated topology.

NCCL allows no second rank on a device, so there the trainer rank on the device (the worker's *door*) collects what its
worker needs and hands it over in memory: a mapped file in /dev/shm on the CPU, CUDA IPC on a GPU. Two buffers take
turns; one small message each way a round says "full" and "free".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch

from megarl.resharding.transport import Link

_SLOTS = 2
_FOLDER = "/dev/shm"
_TOKEN = torch.zeros(1, dtype=torch.uint8)


class SharedWriter:
    """The door's side."""

    def __init__(self, link_of: Callable[[], Link], peer: int, slot_bytes: int, device: torch.device, name: str):
        """Make the two buffers; `description` tells the worker where they are.

        Args:
            link_of: the communicator to the worker, once it exists.
            peer: the worker's number there.
            slot_bytes: the largest round.
            device: where buffers lie.
            name: unlike any other door's on this machine.
        """
        self._link_of, self._peer = link_of, peer
        self._freed = 0  # rounds that the worker has read
        self._told: list[Callable[[], None]] = []
        if device.type == "cpu":
            path = f"{_FOLDER}/megarl-{os.getpid()}-{name}"
            size = max(1, _SLOTS * slot_bytes)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm is an error here, not a SIGBUS later
            except OSError as error:
                os.unlink(path)
                raise ValueError(
                    f"{_FOLDER} has no room for {size >> 20} MiB of sync buffers ({error}); lower sync.bucket_size_mib"
                ) from error
            finally:
                os.close(descriptor)
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
            self._path = path
            self.description = {"path": path, "slot_bytes": slot_bytes}
        else:
            storage = torch.UntypedStorage(max(1, _SLOTS * slot_bytes), device=device)
            self._path = None
            handle = [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]
            self.description = {"ipc": handle, "slot_bytes": slot_bytes}
        self.slots = torch.tensor([], dtype=torch.uint8, device=device).set_(storage).split(max(1, slot_bytes))

    def slot(self, number: int) -> torch.Tensor:
        """The buffer of round `number`; waits until the worker has read what stood there."""
        if number - self._freed >= _SLOTS:
            self._link_of().receive(self._peer, (1,), torch.uint8)
            self._freed += 1
        return self.slots[number % _SLOTS]

    def full(self) -> None:
        """Tell the worker that the slot is written."""
        if self.slots[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        # Not waited for here: gloo's send ends when the other side receives, and that side may be sending to us.
        self._told.append(self._link_of().exchange(sends=[(self._peer, _TOKEN)]))

    def end(self, rounds: int) -> None:
        """Wait until the worker has read all `rounds`."""
        while self._freed < rounds:
            self._link_of().receive(self._peer, (1,), torch.uint8)
            self._freed += 1
        for wait in self._told:
            wait()
        self._freed, self._told = 0, []

    def abandon(self) -> None:
        """Before an abort: messages under way would keep gloo's connections open, and the worker waiting."""
        self._freed, self._told = 0, []

    def unlink(self) -> None:
        """Once both sides have the memory mapped it needs no name, and nothing is left behind by a crash."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class SharedReader:
    """The worker's side."""

    def __init__(self, description: dict, link: Link, device: torch.device):
        self._link, self._door = link, description["door"]
        size = _SLOTS * description["slot_bytes"]
        if "path" in description:
            storage = torch.UntypedStorage.from_file(description["path"], shared=True, nbytes=max(1, size))
        else:
            index, *handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in description["ipc"]]
            # The door may count the devices of this machine differently.
            storage = torch.UntypedStorage._new_shared_cuda(device.index if index is not None else index, *handle)
        whole = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
        self._slots = whole.split(max(1, description["slot_bytes"]))
        self._told: list[Callable[[], None]] = []

    def post(self, number: int, size: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """(a private buffer of round `number`, a function that fills it)."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._slots[0].device)

        def fill() -> None:
            self._link.receive(self._door, (1,), torch.uint8)
            buffer.copy_(self._slots[number % _SLOTS][:size])
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()
            self._told.append(self._link.exchange(sends=[(self._door, _TOKEN)]))
            if len(self._told) > _SLOTS:
                self._told.pop(0)()  # the door has heard it: it has filled the slot since

        return buffer, fill
