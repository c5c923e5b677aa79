"""Run a function on several gloo ranks of this machine, and get every rank's result or its traceback."""

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


class RankError(AssertionError):
    """A rank raised, died or took too long; the message holds the tracebacks, the first to fail first."""


def run_ranks(function: Callable, world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """[function(*args) on rank r for r in range(world_size)], in fresh processes with a default gloo group.

    function: at the top level of an importable module; inside it, `torch.distributed` is initialised.
    args and results: what torch.save can hold (tensors, numbers, strings, lists, dicts).
    A rank that raises or takes too long ends them all, with a RankError.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(
            _run_rank, args=(function, world_size, folder, timeout_seconds, args), nprocs=world_size, join=False
        )
        deadline = time.monotonic() + timeout_seconds
        try:
            while not context.join(timeout=1.0, grace_period=2.0):
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise RankError(f"{function.__qualname__}: ranks {alive} took longer than {timeout_seconds} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            failures = sorted(Path(folder).glob("*.traceback"), key=lambda file: file.stat().st_mtime_ns)
            shown = "\n".join(f"rank {file.stem}: {file.read_text()}" for file in failures)
            raise RankError(f"{function.__qualname__}: {shown or error}") from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(world_size)]


def _run_rank(rank: int, function: Callable, world_size: int, folder: str, timeout_seconds: float, args: tuple) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    try:
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
    except Exception:
        # Written while the others still wait: what they then raise, a lost connection, comes second.
        Path(folder, f"{rank}.traceback").write_text(traceback.format_exc())
        raise
    dist.barrier()
    dist.destroy_process_group()
