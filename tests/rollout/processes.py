"""Which processes exist, for tests that nothing is left running."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable

PR_SET_CHILD_SUBREAPER = 36
Process = tuple[int, int]  # pid and start time: a pid alone may be given out again


def stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time of a process. OSError when there is none."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def descendants(root: int) -> set[Process]:
    """Every living process below `root`, and itself."""
    table = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            table[int(entry)] = stat(int(entry))
    found, frontier = set(), [root]
    while frontier:
        pid = frontier.pop()
        if pid in table and table[pid][0] != "Z":
            found.add((pid, table[pid][2]))
        frontier += [child for child, (_, parent, _) in table.items() if parent == pid]
    return found


def naming(text: str) -> set[Process]:
    """Every living process with `text` in its command line: also those that lost their parent."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                named = text.encode() in file.read()
            state, _, started = stat(int(entry))
            if named and state != "Z" and int(entry) != os.getpid():
                found.add((int(entry), started))
    return found


def alive(processes: Iterable[Process]) -> set[Process]:
    """Those that still run (a zombie does not)."""
    found = set()
    for pid, started in processes:
        with contextlib.suppress(OSError):
            state, _, now_started = stat(pid)
            if state != "Z" and now_started == started:
                found.add((pid, started))
    return found


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def adopting_orphans():
    """Make this process the parent of everything below it that loses its own, so that `descendants` sees it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
