"""Keeps one server process from outliving its owner: `python -m megarl.supervisor --owner PID -- COMMAND...`

The owner holds the write end of this program's stdin and never writes. When that pipe closes, however the owner died,
or when the owner is no longer the parent, or on SIGTERM, the command and everything it started are ended: SIGTERM,
`--grace` seconds, SIGKILL. When the command ends by itself, what it left behind is killed and its exit status becomes
this program's (128 + signal number for a signal).

Descendants cannot escape by losing their parent: this program is a child subreaper, so orphans become its children.
A terminal's Ctrl-C reaches neither this program (the owner starts it in a session of its own) nor the command. Only the
standard library is imported: nothing here may fail for want of memory, a GPU or a package.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    arguments = _arguments()
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    asked_to_end = []
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):  # a handler, not SIG_IGN: that would be inherited
        signal.signal(ignored, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))

    server = subprocess.Popen(
        arguments.command,
        stdin=subprocess.DEVNULL,
        pass_fds=arguments.pass_fd,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    for descriptor in arguments.pass_fd:
        os.close(descriptor)  # its other end is to close with the command
    status = None
    while status is None and not asked_to_end and os.getppid() == arguments.owner:
        readable, _, _ = select.select([0, wake_read], [], [], 1.0)
        if 0 in readable and not os.read(0, 4096):
            break
        if wake_read in readable:
            os.read(wake_read, 4096)
        status = _reap(server.pid)
    if status is None:
        status = _end(server.pid, arguments.grace)
    _kill_descendants()
    for path in arguments.remove:
        with contextlib.suppress(OSError):  # the folder is not empty until the last engine's supervisor is here
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megarl.supervisor")
    parser.add_argument("--owner", type=int, required=True, help="process id of the owner, this program's parent")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--remove", action="append", default=[], help="file or empty folder to remove at the end")
    parser.add_argument("--pass-fd", type=int, action="append", default=[], help="file descriptor for the command")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(server: int) -> int | None:
    """Collect every child that has ended, adopted ones included; the server's exit status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                code = os.waitstatus_to_exitcode(wait_status)
                status = code if code >= 0 else 128 - code
    return status


def _end(server: int, grace: float) -> int:
    for pid in _descendants():
        _signal(pid, signal.SIGTERM)
    status, deadline = None, time.monotonic() + grace
    while _descendants() and time.monotonic() < deadline:
        status = _reap(server) if status is None else _reap(0) or status
        time.sleep(0.02)
    return 128 + signal.SIGTERM if status is None else status


def _kill_descendants() -> None:
    while descendants := _descendants():
        for pid in descendants:
            _signal(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(0.01)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> list[int]:
    """Every living or unreaped process below this one."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended between the listing and the reading
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found, frontier = [], [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


if __name__ == "__main__":
    sys.exit(main())
