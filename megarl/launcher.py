"""Starts the trainer ranks of one node with torch's elastic agent; on many nodes torchrun does it (launch/slurm)."""

import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

PARENT_POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0


def is_rank() -> bool:
    """Whether this process was started as a trainer rank, by torchrun or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def checks_input() -> bool:
    """Whether this process checks models and folders before the run: the user's own, or rank 0 under torchrun."""
    return not is_rank() or (os.environ["RANK"] == "0" and "MEGARL_LAUNCHED" not in os.environ)


def launch(arguments: list[str], num_ranks: int) -> int:
    """Run `python -m megarl <arguments>` as `num_ranks` ranks on this machine and wait for them.

    The first rank that fails ends the others. Its message is printed once, as one line.

    Returns:
        the exit status: 0, or that of the first rank that failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ["MEGARL_LAUNCHED"] = "1"
    logging.disable()  # this process only waits: what the agent has to say is told below, in one line
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="megarl",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(agent, sys.executable)("-m", "megarl", *arguments)
    except ChildFailedError as error:
        # A rank that left word is the cause; the others merely lost their peer.
        failures = sorted(error.failures.values(), key=lambda f: (not Path(f.error_file).is_file(), f.timestamp))
        failure = failures[0]
        print(_message(failure), file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except (SignalException, KeyboardInterrupt):
        print("interrupted; every process of the run is being ended", file=sys.stderr)
        return 130
    return 0


def _message(failure) -> str:
    if Path(failure.error_file).is_file():
        return json.loads(Path(failure.error_file).read_text())["message"]["message"]
    if failure.exitcode < 0:
        return f"error: trainer rank {failure.local_rank} was ended by signal {-failure.exitcode}"
    return f"error: trainer rank {failure.local_rank} ended with status {failure.exitcode}; run with --debug for more"


def tell_launcher(error: BaseException) -> bool:
    """In a rank: leave the error where the launcher finds it. False when nobody is there to print it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or "MEGARL_LAUNCHED" not in os.environ:
        return False
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    Path(path).write_text(json.dumps({"message": {"message": f"error: {error}", "extraInfo": extra}}))
    return True


def wait_for_the_cause() -> None:
    """In a rank that failed without a word for the user: let the launcher end us first if another rank is the cause.

    When one rank fails, the others fail in their next collective, and their tracebacks would bury its message.
    """
    if "MEGARL_LAUNCHED" in os.environ:
        time.sleep(GRACE_SECONDS)


def end_with_parent() -> None:
    """In a rank: end this process once its launcher is gone, however it went; the rollout driver then ends itself."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
