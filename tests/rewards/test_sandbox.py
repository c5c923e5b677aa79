"""Hostile programs are contained and named; honest ones run. In namespaces where this machine has them."""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.errors import MegarlError
from megarl.rewards import sandbox, sandbox_process
from megarl.rewards.sandbox import STATUSES, Limits
from tests.rollout.processes import alive, descendants, naming, wait_until

LIMITS = Limits(wall_seconds=1.5, cpu_seconds=1, memory_mib=192, disk_mib=4, processes=12, open_files=32, output_kib=64)
SECRET = "megarl-secret-5f1c"
MARK = f"megarl_sandbox_mark_{os.getpid()}"
NAMESPACES = not asyncio.run(sandbox.missing())
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="this machine allows no namespaces")
MODES = [pytest.param(True, marks=needs_namespaces, id="namespaces"), pytest.param(False, id="plain")]

# name -> (program, the statuses it may end with). Whatever gets through prints ESCAPED. {secret} is a file of the run.
HOSTILE = {
    "fork_bomb": ("import os, time\nfor _ in range(7):\n  os.fork()\ntime.sleep(60)", {"processes"}),
    "threads": (
        "import threading, time\nfor _ in range(200):\n"
        "  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('ESCAPED')",
        {"failed"},
    ),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 22))", {"memory"}),
    "memory_of_many": (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0: break\nx = bytearray(60 << 20)\ntime.sleep(60)",
        {"memory"},
    ),
    "disk": ("with open('big', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", {"disk"}),
    "busy_loop": ("while True: pass", {"cpu"}),
    "endless_output": ("while True: print('x' * 1000)", {"output"}),
    "endless_errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output"}),
    "ignores_sigterm": (
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True: time.sleep(60)",
        {"timeout"},
    ),
    "silent_and_closed": ("import os, time\nos.closerange(0, 64)\ntime.sleep(60)", {"timeout"}),
    "daemon": (
        "import os, sys, subprocess\nif os.fork() == 0:\n  os.setsid()\n"
        f"  subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{MARK}'], start_new_session=True)\n"
        "  os._exit(0)\nos.wait()\nprint('left')",
        {"ok"},
    ),
    "kills_its_parent": (
        "import os, time\nparent = os.getppid()\ntry: os.kill(parent, 9)\nexcept PermissionError: pass\n"
        "time.sleep(0.2)\nif os.getppid() != parent: print('ESCAPED')",
        {"ok"},
    ),
    "raises_its_limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')",
        {"failed"},
    ),
    "many_open_files": ("f = [open('/dev/null') for _ in range(100)]\nprint('ESCAPED')", {"failed"}),
    "segfault": ("import ctypes\nctypes.string_at(0)", {"killed"}),
    "reads_the_environment": ("import os\nprint(os.environ, open('/proc/self/environ').read())", {"ok"}),
    "writes_the_interpreter": ("import sys\nopen(sys.executable, 'ab')\nprint('ESCAPED')", {"failed"}),
    "symlinks": (
        "import os\nos.symlink('{folder}', 'link')\nos.mkdir('d')\nos.symlink('{folder}', 'd/link')\nos.chmod('d', 0)\n"
        "os.remove('main.py')\nos.symlink('{secret}', 'main.py')\nopen('main.py', 'w').write('')\nprint('ESCAPED')",
        {"failed"},
    ),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'') == 0:\n"
        "  print('ESCAPED')",
        {"ok"},
    ),
}
# What only namespaces prevent.
HOSTILE_TO_NAMESPACES = {
    "reads_the_run_folder": ("import sys\nsys.stdout.write('ESCAPED' + open('{secret}').read())", {"failed"}),
    "reads_other_processes": (
        "import os\nfor p in filter(str.isdigit, os.listdir('/proc')):\n  for name in ('environ', 'cmdline'):\n"
        "    try: print(open(f'/proc/{{p}}/{{name}}').read())\n    except OSError: pass\n"
        "print(os.listdir('/proc/1/root'))",
        {"failed"},
    ),
    "kills_everybody": (
        "import os\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: pass\nos.kill(1, 9)\nprint('ESCAPED')",
        {"failed"},
    ),
    "connects_to_loopback": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}))\nprint('ESCAPED')",
        {"failed"},
    ),
    "connects_to_an_abstract_socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{abstract}')\nprint('ESCAPED')",
        {"failed"},
    ),
    "many_small_files": (
        "for n in range(10**6):\n  with open(f'f{{n}}', 'wb') as f: f.write(bytes(5000))",
        {"disk"},
    ),
    "makes_namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor flag in (0x10000000, 0x00020000, 0x40000000):\n"
        "  if libc.unshare(flag) == 0: print('ESCAPED')",
        {"ok"},
    ),
    "writes_the_system": (
        "import os\nfor path in ('/x', '/usr/x', '/dev/x', '/proc/sys/kernel/hostname'):\n"
        "  try: open(path, 'w').write('x')\n  except OSError: continue\n  print('ESCAPED', path)",
        {"ok"},
    ),
}


def run(source, namespaces=None, stdin="", limits=LIMITS):
    return asyncio.run(sandbox.run(source, stdin, limits, namespaces))


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A run folder, a secret in the environment, and services that must see no visitor."""
    tmp_path.chmod(0o700)
    secret = tmp_path / "metrics.jsonl"
    secret.write_text(SECRET)
    monkeypatch.setenv("MEGARL_TEST_KEY", SECRET)
    folders = Path(tempfile.mkdtemp())  # not below tmp_path, which nobody else can enter
    folders.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    sandbox._public_python.cache_clear()
    before = descendants(os.getpid())
    visitors, abstract = [], MARK
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + abstract)
        unix.listen()
        for server in (tcp, unix):
            threading.Thread(target=_note_visitors, args=(server, visitors), daemon=True).start()
        yield {"secret": secret, "folder": tmp_path, "port": tcp.getsockname()[1], "abstract": abstract}
        for server in (tcp, unix):
            server.shutdown(socket.SHUT_RDWR)
    assert not visitors and secret.read_text() == SECRET and list(tmp_path.iterdir()) == [secret]
    assert wait_until(lambda: not naming(MARK) and not alive(descendants(os.getpid()) - before), 5)
    folders.rmdir()  # which the sandbox has left empty
    sandbox._public_python.cache_clear()


def _note_visitors(server, visitors):
    try:
        while True:
            visitors.append(server.accept())
    except OSError:
        pass


def contained(name, program, expected, places, namespaces):
    source = program
    for key, value in places.items():
        source = source.replace("{" + key + "}", str(value))
    source = source.replace("{{", "{").replace("}}", "}")
    # On a busy machine a program may need longer to meet another limit than the clock's.
    limits = LIMITS if "timeout" in expected else replace(LIMITS, wall_seconds=15)
    started = time.monotonic()
    outcome = run(source, namespaces, limits=limits)
    assert outcome.status in expected, outcome
    assert outcome.status in STATUSES and (outcome.status == "ok" or outcome.detail)
    assert "ESCAPED" not in outcome.stdout and SECRET not in outcome.stdout + outcome.stderr
    assert len(outcome.stdout) + len(outcome.stderr) <= 2 * (LIMITS.output_kib << 10)
    assert time.monotonic() - started < limits.wall_seconds + 3


@pytest.mark.parametrize("namespaces", MODES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_contained_and_named(name, namespaces, places):
    contained(name, *HOSTILE[name], places, namespaces)


@needs_namespaces
@pytest.mark.parametrize("name", HOSTILE_TO_NAMESPACES)
def test_namespaces_contain_what_limits_cannot(name, places):
    contained(name, *HOSTILE_TO_NAMESPACES[name], places, True)


@pytest.mark.parametrize("namespaces", MODES)
def test_honest_programs(namespaces, places):
    echo = run("import sys\nfor line in sys.stdin: print(int(line) ** 2)", namespaces, stdin="3\n4\n")
    assert (echo.status, echo.stdout) == ("ok", "9\n16\n") and 0 < echo.seconds < 2
    assert run("print('\u00e4\U0001f600' + input())", namespaces, stdin="\u00df").stdout == "\u00e4\U0001f600\u00df\n"
    large = run("import sys\nprint(len(sys.stdin.read()))", namespaces, stdin="x" * (1 << 21))
    assert large.stdout == "2097152\n"
    ordinary = "import collections, heapq, json, math, re, subprocess, sys, tempfile, threading\n"
    ordinary += "with tempfile.NamedTemporaryFile('w') as f: f.write('a')\n"
    ordinary += "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout)"
    assert run(ordinary, namespaces).stdout == "1\n\n"
    assert run("", namespaces).status == "ok"


@pytest.mark.parametrize("namespaces", MODES)
def test_failures_keep_their_last_words(namespaces, places):
    raised = run("print('before')\nraise KeyError('x')", namespaces)
    assert (raised.status, raised.detail, raised.stdout) == ("failed", "KeyError: 'x'", "before\n")
    assert run("def", namespaces).detail.startswith("SyntaxError")
    assert run("import sys\nsys.exit(3)", namespaces).status == "failed"


def test_runs_side_by_side(places):
    async def work():
        return await asyncio.gather(*(sandbox.run(f"print({n})", limits=LIMITS) for n in range(8)))

    assert [outcome.stdout for outcome in asyncio.run(work())] == [f"{n}\n" for n in range(8)]


def test_a_run_that_is_given_up_leaves_nothing(places):
    source = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', '{MARK}'])"

    async def work():
        task = asyncio.create_task(sandbox.run(source, limits=Limits(wall_seconds=30)))
        while not naming(MARK):
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())


def test_without_namespaces_it_says_what_is_lost(monkeypatch):
    async def refused(*arguments, **named):
        return sandbox.Outcome("setup", "unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "_run", refused)
    monkeypatch.setattr(sandbox, "_known_missing", [])
    assert "unshare: Operation not permitted" in asyncio.run(sandbox.missing())
    with pytest.raises(MegarlError, match="cannot make namespaces on this machine: unshare"):
        asyncio.run(sandbox.run("", namespaces=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="of root alone")
def test_root_never_runs_programs_as_root(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # pytest's folders are private
    sandbox._public_python.cache_clear()
    with pytest.raises(MegarlError, match="root runs programs as the user nobody, who must reach .* change TMPDIR"):
        run("", namespaces=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that every user can reach")
@pytest.mark.parametrize("namespaces", MODES)
def test_as_an_ordinary_user(namespaces, tmp_path_factory):
    """The sandbox's own process started by somebody who is not root."""
    folder = tmp_path_factory.mktemp("sandbox")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o111)
    script = folder / "sandbox_process.py"
    script.write_text(Path(sandbox_process.__file__).read_text())
    work = folder / "work"
    work.mkdir()
    os.chown(work, 12345, 12345)
    job = {
        "source": "import os\nprint(os.getuid(), os.getpid())\nopen('/usr/x', 'w')",
        "stdin": "",
        "limits": vars(LIMITS),
        "namespaces": namespaces,
        "folder": str(work),
        "python": os.path.realpath("/usr/bin/python3"),
        "readable": [path for path in sandbox._SYSTEM if os.path.lexists(path)],
    }
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-S", str(script)], stdin=-1, stdout=-1, user=12345, group=12345, extra_groups=[]
    ) as process:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        outcome = json.loads(process.stdout.read())
    assert outcome["status"] == "failed", outcome
    if namespaces:
        assert outcome["stdout"] == "1000 2\n" and "Read-only file system" in outcome["detail"]
    else:
        assert outcome["stdout"].startswith("12345 ") and "Permission denied" in outcome["detail"]
