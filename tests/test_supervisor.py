"""The supervisor alone, over a tree of plain Python processes that resist being ended."""

import os
import signal
import subprocess
import sys

import pytest

from tests.rollout.processes import alive, descendants, wait_until

# A server that ignores SIGTERM, with a child in a session of its own and an orphaned grandchild.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(sleeper, start_new_session=True)
subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"])
open(sys.argv[1], "w").write("ready")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
OWNER = """
import os, subprocess, sys, time
subprocess.Popen(
    [sys.executable, "-m", "megarl.supervisor", "--owner", str(os.getpid()), "--grace=.3", "--", *sys.argv[1:]],
    stdin=subprocess.PIPE, start_new_session=True,
)
time.sleep(600)
"""


def supervise(command: list[str], *options: str) -> subprocess.Popen:
    prefix = [
        sys.executable,
        "-m",
        "megarl.supervisor",
        "--owner",
        str(os.getpid()),
        "--grace",
        "0.3",
        *options,
        "--",
    ]
    return subprocess.Popen(prefix + command, stdin=subprocess.PIPE, start_new_session=True)


def stubborn(tmp_path, seconds: float) -> list[str]:
    return [sys.executable, "-c", STUBBORN, str(tmp_path / "ready"), str(seconds)]


def test_owner_killed_ends_the_whole_tree(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *stubborn(tmp_path, 600)])
    assert wait_until((tmp_path / "ready").exists, 20)
    tree = descendants(owner.pid)
    assert len(tree) >= 4  # owner, supervisor, server, its child; the orphan hangs below the supervisor
    assert len(descendants(owner.pid)) == 5
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not alive(tree), 10), alive(tree)


def test_server_ends_by_itself(tmp_path):
    supervisor = supervise(stubborn(tmp_path, 0.3))
    assert wait_until((tmp_path / "ready").exists, 20)
    tree = descendants(supervisor.pid)
    assert supervisor.wait(10) == 7
    assert not alive(tree)


@pytest.mark.parametrize("how", ["close the pipe", "SIGTERM"])
def test_ending_on_request(tmp_path, how):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "socket").touch()
    removals = [f"--remove={tmp_path / 'folder' / 'socket'}", f"--remove={tmp_path / 'folder'}"]
    supervisor = supervise(stubborn(tmp_path, 600), *removals)
    assert wait_until((tmp_path / "ready").exists, 20)
    tree = descendants(supervisor.pid)
    if how == "SIGTERM":
        supervisor.terminate()
    else:
        supervisor.stdin.close()
    assert supervisor.wait(10) != 0
    assert not alive(tree)
    assert not (tmp_path / "folder").exists()


def test_ctrl_c_is_the_owners_business(tmp_path):
    supervisor = supervise(stubborn(tmp_path, 600))
    assert wait_until((tmp_path / "ready").exists, 20)
    tree = descendants(supervisor.pid)
    os.killpg(supervisor.pid, signal.SIGINT)
    assert not wait_until(lambda: alive(tree) != tree, 0.5)
    supervisor.stdin.close()
    supervisor.wait(10)
    assert not alive(tree)


def test_death_by_signal_is_reported_as_a_shell_would():
    supervisor = supervise([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert supervisor.wait(10) == 128 + signal.SIGKILL
