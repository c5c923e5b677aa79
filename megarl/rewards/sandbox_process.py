"""Runs one untrusted Python program for rewards/sandbox.py: `python -I -S sandbox_process.py`, in a process of its own.

The job is one line of JSON on stdin, which then stays open as a lifeline: when it closes, all that the program started
is killed. The outcome is one JSON object on stdout. Only the standard library is imported: it starts in 10 ms.

    this process          outside: keeps the time, reads the output, adds up the memory, kills
      init                process 1 of new user, process, network, IPC and mount namespaces
        program           the limits of setrlimit, an unprivileged user without any capability, an empty environment

The kernel kills all of a process namespace when its process 1 ends, so nothing can outlive the outcome. The root of the
new mount namespace is a read-only tmpfs with the interpreter and the system's libraries (read-only) and one writable
folder of limited size. Without namespaces ("namespaces": false in the job), the program runs in a session of its own
under the same limits, in an empty temporary folder, and its descendants are found as those of a child subreaper.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH, _SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 2, 442, -100, 0x8000
_USER, _NOBODY = 1000, 65534  # the program's user inside, and outside where root runs this
_POLL_SECONDS = 0.02
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


class SetupFailed(Exception):
    """This machine does not let us build the namespaces."""


def main() -> None:
    job = json.loads(_read_line(0))
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        outcome = _run(job)
    except SetupFailed as error:
        outcome = {"status": "setup", "detail": str(error)}
    finally:
        _remove_contents(job["folder"])
    os.write(1, json.dumps(outcome).encode())


def _run(job: dict) -> dict:
    if job["namespaces"]:
        _enter_namespaces()
    outputs = [os.pipe(), os.pipe()]
    told_read, told_write = os.pipe()  # init's last words: the program's wait status, or what it could not set up
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        for read_end, _ in outputs:
            os.close(read_end)
        os.close(told_read)
        _as_init(job, [write_end for _, write_end in outputs], told_write)
    for _, write_end in outputs:
        os.close(write_end)
    os.close(told_write)
    try:
        ended_by, texts, told = _watch(child, [read_end for read_end, _ in outputs], told_read, job["limits"], started)
    finally:
        _kill_all(child)
    stdout, stderr = (text.decode(errors="replace") for text in texts)
    if told.startswith(b"setup "):
        raise SetupFailed(told[6:].decode())
    status, detail = _verdict(ended_by, told, stderr)
    return {
        "status": status,
        "detail": detail,
        "stdout": stdout,
        "stderr": stderr,
        "seconds": time.monotonic() - started,
    }


def _watch(child: int, outputs: list[int], told_read: int, limits: dict, started: float):
    """Read outputs and last words until the program has ended or met a limit: (that limit or None, outputs, words)."""
    texts, told = dict.fromkeys(outputs, b""), b""
    most = limits["output_kib"] << 10
    poll = select.poll()
    for descriptor in (0, told_read, *outputs):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        for descriptor, _ in poll.poll(_POLL_SECONDS * 1000):
            data = os.read(descriptor, 1 << 16)
            if descriptor == 0:
                return "owner", list(texts.values()), told  # nobody waits for the outcome
            if descriptor == told_read:
                told += data
                if not data:  # init has ended, and with it every process that could still write
                    _drain(texts, most)
                    return None, list(texts.values()), told
                continue
            if not data:
                poll.unregister(descriptor)
            texts[descriptor] += data
            if sum(map(len, texts.values())) > most:
                return "output", [text[:most] for text in texts.values()], told
        if time.monotonic() - started > limits["wall_seconds"]:
            return "timeout", list(texts.values()), told
        processes = _descendants(child)
        if len(processes) >= limits["processes"]:
            return "processes", list(texts.values()), told
        if sum(map(_resident_bytes, processes)) > limits["memory_mib"] << 20:
            return "memory", list(texts.values()), told


def _drain(texts: dict[int, bytes], most: int) -> None:
    """What is left in the pipes, as far as it may be."""
    for descriptor in texts:
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while len(texts[descriptor]) < most and (data := os.read(descriptor, 1 << 16)):
                texts[descriptor] += data


def _verdict(ended_by: str | None, told: bytes, stderr: str) -> tuple[str, str]:
    """(status, what more there is to say)."""
    last = stderr.strip().rpartition("\n")[2][:300]
    if ended_by is not None:
        return ended_by, last
    if not told:
        return "killed", "its init was killed"
    code = os.waitstatus_to_exitcode(int(told))
    if code == -signal.SIGXCPU:
        return "cpu", "SIGXCPU"
    if code == -signal.SIGXFSZ or last.startswith(("OSError: [Errno 27]", "OSError: [Errno 28]")):  # EFBIG, ENOSPC
        return "disk", last or "SIGXFSZ"
    if code < 0:
        return "killed", signal.Signals(-code).name
    if last.startswith("MemoryError"):
        return "memory", last
    return ("ok" if code == 0 else "failed"), last


def _enter_namespaces() -> None:
    """New user, process, network, IPC and host-name namespaces; for children, as far as processes are concerned.

    Root maps itself, which it needs for mounting, and an unprivileged user of the machine as the program's. That takes
    a process outside. Anyone else is the program's user.
    """
    owner, group, owner_pid = os.geteuid(), os.getegid(), os.getpid()
    ready_read, ready_write = os.pipe()
    mapper = None
    if owner == 0:
        mapper = os.fork()
        if mapper == 0:
            os.close(ready_write)
            os.read(ready_read, 1)
            try:
                _write(f"/proc/{owner_pid}/uid_map", f"0 0 1\n{_USER} {_NOBODY} 1")
                _write(f"/proc/{owner_pid}/gid_map", f"0 0 1\n{_USER} {_NOBODY} 1")
            except OSError:
                os._exit(1)
            os._exit(0)
    os.close(ready_read)
    failed = _LIBC.unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS)
    number = ctypes.get_errno()
    os.close(ready_write)
    mapped = mapper is None or os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1]) == 0
    if failed:
        raise SetupFailed(f"unshare: {os.strerror(number)}")
    if not mapped:
        raise SetupFailed("the users of the namespace could not be mapped")
    if owner != 0:
        try:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{_USER} {owner} 1")
            _write("/proc/self/gid_map", f"{_USER} {group} 1")
        except OSError as error:
            raise SetupFailed(f"uid_map: {error}") from None


def _as_init(job: dict, outputs: list[int], told: int) -> None:
    """Set up the file system, start the program, wait for its end, tell its status. Does not return."""
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        folder = _build_root(job) if job["namespaces"] else _plain_folder(job)
    except (OSError, SetupFailed) as error:
        os.write(told, f"setup {error}".encode())
        os._exit(1)
    program = os.fork()
    if program == 0:
        try:
            _as_program(job, outputs, folder)
        except BaseException as error:
            os.write(2, f"the program could not be started: {error!r}".encode())
        os._exit(127)
    for descriptor in outputs:
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    os.write(told, str(status).encode())
    os._exit(0)


def _as_program(job: dict, outputs: list[int], folder: str) -> None:
    """Become the program."""
    limits, python = job["limits"], job["python"]
    os.setsid()
    given = os.memfd_create("stdin")
    os.write(given, job["stdin"].encode())
    os.lseek(given, 0, os.SEEK_SET)
    for descriptor, number in ((given, 0), (outputs[0], 1), (outputs[1], 2)):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    os.chdir(folder)
    if not job["namespaces"]:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    user = _USER if job["namespaces"] else _plain_user()
    mebibyte = 1 << 20
    for which, most in (
        (resource.RLIMIT_AS, limits["memory_mib"] * mebibyte),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["disk_mib"] * mebibyte),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"] + 3 + (0 if job["namespaces"] else _processes_of(user))),
    ):
        # One second between the soft and the hard limit on CPU time: SIGXCPU has a name, SIGKILL has not.
        extra = 1 if which == resource.RLIMIT_CPU else 0
        resource.setrlimit(which, (most, most + extra))
    if os.geteuid() == 0 and user != 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    environment = _ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
    os.execve(python, [python, "-s", "-X", "utf8", "main.py"], environment)


def _plain_folder(job: dict) -> str:
    folder = job["folder"]
    _write(f"{folder}/main.py", job["source"])
    os.chown(folder, _plain_user(), -1)
    return folder


def _plain_user() -> int:
    """Without namespaces, root becomes nobody and anyone else stays who it is."""
    return _NOBODY if os.geteuid() == 0 else os.geteuid()


def _build_root(job: dict) -> str:
    """A file system with the interpreter and nothing of the machine's; returns the writable folder in it."""
    root, limits = job["folder"], job["limits"]
    _checked(_LIBC.unshare(_NEWNS), "unshare the mounts")
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=1k,mode=755")
    for path in job["readable"]:
        _show(path, root)
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "random", "urandom"):
        _write(f"{root}/dev/{name}", "")
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    os.mkdir(f"{root}/proc")
    with contextlib.suppress(SetupFailed):  # containers often forbid it; few programs miss it
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    os.mkdir(f"{root}/box")
    _mount("tmpfs", f"{root}/box", "tmpfs", _NOSUID | _NODEV, f"size={limits['disk_mib']}m,nr_inodes=1k,mode=777")
    os.symlink("/box", f"{root}/tmp")
    _write(f"{root}/box/main.py", job["source"])
    # No namespaces inside: in a new one the program would have every capability again.
    for base in (f"{root}/proc", "/proc"):
        with contextlib.suppress(OSError):
            _write(f"{base}/sys/user/max_user_namespaces", "0")
            break
    else:
        raise SetupFailed("user.max_user_namespaces cannot be set")
    os.mkdir(f"{root}/old")
    _checked(_LIBC.pivot_root(root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    _checked(_LIBC.umount2(b"/old", _MNT_DETACH), "umount")
    os.rmdir("/old")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    return "/box"


def _show(path: str, root: str) -> None:
    """Make `path` readable below `root`, as the symbolic link or folder that it is."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    _mount(path, target, None, _BIND | _REC)
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID, 0, 0, 0)  # struct mount_attr
    size = ctypes.sizeof(attributes)
    if _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size):
        kept = os.statvfs(path).f_flag & (_NODEV | 8)  # locked flags of the original (8: noexec) must stay
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if one is None else one.encode() for one in (source, target, kind)]
    _checked(_LIBC.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _checked(failed: int, what: str) -> None:
    if failed:
        raise SetupFailed(f"{what}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(descriptor, 1 << 20)
        if not part:
            sys.exit("the job ended in the middle")
        data += part
    return data


def _descendants(pid: int) -> list[int]:
    """The living processes below `pid` as they are known outside; `pid` itself is left out."""
    found, frontier = [], [pid]
    while frontier:
        one = frontier.pop()
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children") as file:
                    below = [int(child) for child in file.read().split()]
                found += below
                frontier += below
    return found


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _processes_of(user: int) -> int:
    """Processes of a user on this machine: what RLIMIT_NPROC counts."""
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            count += os.stat(f"/proc/{entry}").st_uid == user
    return count


def _kill_all(child: int) -> None:
    """Kill init, and with it a process namespace; without one, every descendant, until there is none."""
    while True:
        for pid in [child, *_descendants(os.getpid())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)
        except ChildProcessError as error:
            assert error.errno == errno.ECHILD
            return


def _remove_contents(folder: str) -> None:
    """Empty the folder, whatever permissions the program gave what it left there; links are not followed."""
    os.chmod(folder, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            _remove_contents(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


if __name__ == "__main__":
    main()
