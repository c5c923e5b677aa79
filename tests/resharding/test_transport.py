"""Buffers between processes: over a link, through shared memory, and what happens when the other side is gone."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megarl.config.rollout import SyncConfig
from megarl.resharding import transport
from megarl.resharding.bridge import Bridge
from megarl.resharding.shared_memory import SharedReader, SharedWriter
from tests.parallel_utils import run_ranks

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDS = [5000, 0, 7, 12_345]  # bytes


def _meet(rank: int) -> dist.TCPStore:
    """One store of its own, as between a trainer and an engine; the ranks' own group only tells the port."""
    store = transport.host(0) if rank == 0 else None
    port = torch.tensor([store.port if rank == 0 else 0])
    dist.broadcast(port, 0)
    return store or transport.visit(transport.LOOPBACK, int(port))


def _content(number: int, size: int, device) -> torch.Tensor:
    return ((torch.arange(size) * 31 + number) % 251).to(torch.uint8).to(device)


def _over_a_link(backend: str):
    rank = dist.get_rank()
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    link = transport.Link(_meet(rank), "test", rank, 2, backend)
    same = []
    for number, size in enumerate(size for size in ROUNDS if size):
        if rank == 0:
            link.exchange(sends=[(1, _content(number, size, link.device))])()
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=link.device)
            link.exchange(receives=[(0, buffer)])()
            same.append(torch.equal(buffer, _content(number, size, link.device)))
    whole = _content(9, 100, link.device) if rank == 0 else torch.zeros(100, dtype=torch.uint8, device=link.device)
    link.broadcast(whole)
    return same + [torch.equal(whole, _content(9, 100, link.device))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_link(backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL allows one rank a device: needs two GPUs")
    assert run_ranks(_over_a_link, 2, backend) == [[True], [True] * 4]


def _abandoned(through_memory: bool):
    rank = dist.get_rank()
    link = transport.Link(_meet(rank), "test", rank, 2)
    if rank == 0:
        if through_memory:
            door = SharedWriter(lambda: link, 1, 8, torch.device("cpu"), "test-abandoned")
            door.unlink()
            door.full()
        time.sleep(1.0)
        if through_memory:
            door.abandon()
        link.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            link.send(1, torch.zeros(4, dtype=torch.uint8))
        dist.barrier()  # what frees the other side is the abort, not the end of this process
        return 0.0
    if through_memory:
        link.receive(0, (1,), torch.uint8)
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        link.receive(0, (4,), torch.uint8)
    waited = time.monotonic() - before
    dist.barrier()
    return waited


@pytest.mark.parametrize("through_memory", [False, True])
def test_an_aborted_link_fails_at_once_on_the_other_side(through_memory):
    assert run_ranks(_abandoned, 2, through_memory)[1] < 5.0


def _through_memory(device: str):
    rank = dist.get_rank()
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    store = _meet(rank)
    link = transport.Link(store, "test", rank, 2)
    largest = max(ROUNDS)
    if rank == 0:
        door = SharedWriter(lambda: link, 1, largest, where, f"test-{device}")
        door.description["door"] = 0
        dist.broadcast_object_list([door.description])
        for _ in range(2):  # two syncs through the same memory
            for number, size in enumerate(ROUNDS):
                door.slot(number)[:size] = _content(number, size, where)
                door.full()
            door.end(len(ROUNDS))
            door.unlink()
        return [os.path.exists(door.description.get("path", ""))]
    box = [None]
    dist.broadcast_object_list(box)
    reader, same = SharedReader(box[0], link, where), []
    for _ in range(2):
        for number, size in enumerate(ROUNDS):
            time.sleep(0.01)  # the writer is faster: it has to wait for a free slot
            buffer, fill = reader.post(number, size)
            fill()
            same.append(torch.equal(buffer, _content(number, size, where)))
    return same


@pytest.mark.parametrize("device", DEVICES)
def test_shared_memory(device):
    assert run_ranks(_through_memory, 2, device) == [[False], [True] * 8]


def test_a_taken_port_is_named():
    store = transport.host(0)
    with pytest.raises(ValueError, match=f"sync.port={store.port} cannot be opened.*choose another, or 0 for any"):
        transport.host(store.port)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_a_transport_of_gpus_is_refused_without_one(name):
    with pytest.raises(ValueError, match=f"sync.transport={name} needs GPUs.*auto, gloo or shared_memory"):
        Bridge(None, None, SyncConfig(transport=name), None)
