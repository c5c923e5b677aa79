"""Untrusted Python programs, run here under limits: what a code reward calls.

Where Linux lets us make namespaces, a program sees no network (not even loopback), no other process, and no file but
the interpreter, the system's libraries and one small folder of its own; it is an unprivileged user without
capabilities and cannot make namespaces itself. Its processes, memory, CPU time, wall time, files and output are limited
everywhere, and all that it started is killed with it (rewards/sandbox_process.py). Without namespaces, `missing()` says
what is lost. It is not a virtual machine: programs reach the kernel that everything else runs on.
"""

from __future__ import annotations

import asyncio
import functools
import os
import stat
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from megarl.errors import MegarlError

_PROCESS = Path(__file__).with_name("sandbox_process.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_GRACE_SECONDS = 10.0  # beyond its wall time, for the sandbox itself on a busy machine
_PROBE = "import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError as e: print(e.errno)"


@dataclass(frozen=True)
class Limits:
    """What one run of a program may take."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10  # per process
    memory_mib: int = 512  # address space per process, and resident memory of all together
    disk_mib: int = 16  # its folder; without namespaces each file
    processes: int = 16  # threads count too
    open_files: int = 64
    output_kib: int = 256  # stdout and stderr together


@dataclass(frozen=True)
class Outcome:
    """How a run ended: one of STATUSES, and what the program wrote, both cut at the limit."""

    status: str
    detail: str  # the last line of stderr, the signal, or what the status means
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


STATUSES = {
    "ok": "ended with exit status 0",
    "failed": "ended with another exit status",
    "timeout": "met its wall time",
    "cpu": "met its CPU time",
    "memory": "met its memory",
    "disk": "met the size of its folder or of a file",
    "processes": "met its number of processes",
    "output": "met the size of its output",
    "killed": "ended by a signal",
    "sandbox": "the sandbox itself was ended",
}


async def run(source: str, stdin: str = "", limits: Limits = Limits(), namespaces: bool | None = None) -> Outcome:
    """Run a Python program with a given stdin.

    Args:
        source: the program; it runs as main.py in its own folder, with an empty environment.
        stdin: all of its standard input.
        namespaces: False: without namespaces. Default: with them where `missing()` is empty.

    Raises:
        MegarlError: this machine does not allow the namespaces that were asked for; or it allows none, this is root,
            and the user nobody cannot reach a Python and the temporary folder.
    """
    with_namespaces = not await missing() if namespaces is None else namespaces
    outcome = await _run(source, stdin, limits, with_namespaces)
    if outcome.status == "setup":
        raise MegarlError(f"the sandbox cannot make namespaces on this machine: {outcome.detail}")
    return outcome


async def missing() -> str:
    """What protects nothing here, and why; empty where the namespaces work. Tried once in a process, then known."""
    if not _known_missing:
        tried = await _run(_PROBE, "", Limits(), namespaces=True)
        if tried.status == "ok" and tried.stdout.strip().isdigit():
            _known_missing.append("")
        else:
            _known_missing.append(
                f"no namespaces on this machine ({tried.detail or tried.status}): programs run with its network "
                "and can read what their user can read"
            )
    return _known_missing[0]


_known_missing: list[str] = []


async def _run(source: str, stdin: str, limits: Limits, namespaces: bool) -> Outcome:
    python = os.path.realpath(sys.executable) if namespaces or os.geteuid() else _public_python()
    with tempfile.TemporaryDirectory(prefix="megarl-sandbox-") as folder:
        job = {
            "source": source,
            "stdin": stdin,
            "limits": asdict(limits),
            "namespaces": namespaces,
            "folder": folder,
            "python": python,
            "readable": _readable(),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_PROCESS)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            reading = process.stdout.read()  # its stdin stays open: closing it would end the program
            answer = await asyncio.wait_for(reading, limits.wall_seconds + _GRACE_SECONDS)
        except TimeoutError:
            answer = b""
        finally:
            process.stdin.close()
            if process.returncode is None:
                await _ended(process)
    if not answer:
        return Outcome("sandbox", f"its process ended with exit status {process.returncode} and no outcome")
    outcome = Outcome(**msgspec.json.decode(answer))
    return outcome if outcome.detail or outcome.status == "ok" else replace(outcome, detail=STATUSES[outcome.status])


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait until the sandbox has ended all; kill it when it does not."""
    try:
        await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


@functools.cache
def _readable() -> list[str]:
    """What the program needs to see: the interpreter and the system's libraries."""
    prefix = os.path.realpath(sys.base_prefix)
    system = [path for path in _SYSTEM if os.path.lexists(path)]
    return system if prefix.startswith("/usr/") or prefix == "/usr" else [*system, prefix]


@functools.cache
def _public_python() -> str:
    """A Python that root can run after it has become nobody. MegarlError without one: never run programs as root."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        if os.path.exists(python) and _is_public(python) and _is_public(tempfile.gettempdir()):
            return python
    raise MegarlError(
        "without namespaces, root runs programs as the user nobody, who must reach a Python "
        f"({os.path.realpath(sys.executable)} or /usr/bin/python3) and the temporary folder ({tempfile.gettempdir()}); "
        "change TMPDIR, or start megarl as another user"
    )


def _is_public(path: str) -> bool:
    """Whether every user can reach it."""
    return all(os.stat(folder).st_mode & stat.S_IXOTH for folder in [path, *map(str, Path(path).parents)])
