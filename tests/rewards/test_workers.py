"""Reward functions in real worker processes, with every way to fail injected."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

from megarl.config.rollout import RewardConfig
from megarl.errors import MegarlError
from megarl.rewards.workers import RewardWorkers, Sample
from tests.rollout.processes import alive, descendants, wait_until

FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, time
from megarl.errors import MegarlError
from megarl.rewards import CannotScore

def length(completions):
    return [len(text) for text in completions]

def whims(completions, **columns):
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "hang in C":
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
        if text == "hang with children":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            time.sleep(600)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "leave":
            os._exit(0)
        if text == "exit":
            sys.exit("done")
        if text == "raise":
            raise KeyError("no such word")
        if text == "cannot":
            raise CannotScore("has no words for this dataset")
        if text == "unreachable":
            raise MegarlError("the judge is away")
    values = {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None, "complex": 1j}
    return [values.get(text, {"one": 1.0, "true": True}.get(text, 0.5)) for text in completions]

def too_few(completions, **columns):
    return [1.0]

def graded(completions, **columns):
    return [{"score": 1 / len(text), "acc": 1.0} for text in completions]

async def waits(completions, **columns):
    await asyncio.gather(*(asyncio.sleep(0.2) for _ in completions))
    return [1.0] * len(completions)

def patient(completions):
    time.sleep(0.2)
    return [1.0] * len(completions)
patient.timeout_seconds = 5.0

def compares(completions, **columns):
    assert "raise" not in completions
    return [float(text == max(completions)) for text in completions]
compares.compares_completions = True

def modules(completions, **columns):
    heavy = {"megatron", "torch", "vllm", "transformers", "pydantic"}
    return [len(heavy & {name.split(".")[0] for name in sys.modules})] * len(completions)

def lone(completions):
    return [float(len(completions))] * len(completions)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def sample(*texts, **shared):
    each = {"completions": list(texts), "prompts": ["q"] * len(texts), "finish_reason": ["stop"] * len(texts)}
    return Sample(7, "quiz", each | {"completion_ids": [[1]] * len(texts)}, shared)


@pytest.fixture
def workers(file):
    """`async with workers("whims", timeout_seconds=1) as pool`: started, and closed with nothing left."""

    @asynccontextmanager
    async def started(*names, kwargs=None, **settings):
        functions = [{"name": f"{file}:{name}", "kwargs": kwargs or {}} for name in names]
        pool = RewardWorkers(RewardConfig.model_validate({"functions": functions} | settings))
        before = descendants(os.getpid())
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
            assert wait_until(lambda: not alive(descendants(os.getpid()) - before), 5)

    return started


def run(work):
    return asyncio.run(work())


def test_scores_by_name_and_column(workers):
    async def work():
        async with workers("length", "graded", "modules") as pool:
            assert pool.names == ["length", "graded", "modules"]
            assert (await pool.score(0, sample("a", "abc", level=3))).columns == {"score": [1.0, 3.0]}
            graded = await pool.score(1, sample("a", "ab"))
            assert graded.columns == {"score": [1.0, 0.5], "acc": [1.0, 1.0]} and not graded.events
            assert (await pool.score(2, sample("a"))).columns == {"score": [0.0]}

    run(work)


@pytest.mark.parametrize(
    ("text", "event", "what"),
    [
        ("hang", "timeouts", "did not return within 0.5 s (its deadline) and was killed"),
        ("hang in C", "timeouts", "did not return"),
        ("hang with children", "timeouts", "did not return"),
        ("crash", "crashes", "ended its process (exit status 139)"),
        ("leave", "crashes", "ended its process (exit status 0)"),
        ("exit", "errors", "raised SystemExit: done"),
        ("raise", "errors", "raised KeyError: 'no such word'"),
        ("nan", "invalid", "returned score=nan, which is not a finite number"),
        ("inf", "invalid", "returned score=inf"),
        ("text", "invalid", "returned score='1'"),
        ("none", "invalid", "returned score=None"),
        ("complex", "invalid", "returned score=1j"),
    ],
)
def test_a_failure_is_a_named_event_with_the_default_and_the_others_keep_their_scores(workers, text, event, what):
    async def work():
        async with workers("whims", timeout_seconds=0.5, default_score=-2.0) as pool:
            graded = await pool.score(0, sample("one", text, "true", "other"))
            assert graded.columns == {"score": [1.0, -2.0, 1.0, 0.5]}
            assert graded.events == {event: 1}
            who = f"reward function 'whims', on prompt 7 of data source 'quiz' with completion {text!r}, "
            assert graded.messages[0].startswith(who + what) and len(graded.messages) == 1
            assert (await pool.score(0, sample("one"))).columns == {"score": [1.0]}  # the worker is back

    run(work)


def test_stop_on_error_names_the_completion_and_shows_the_traceback(workers):
    async def work():
        async with workers("whims", on_error="stop", timeout_seconds=0.5) as pool:
            with pytest.raises(ValueError, match=r"(?s)'raise', raised KeyError.*functions.py.*raise KeyError"):
                await pool.score(0, sample("one", "raise"))
            with pytest.raises(ValueError, match="'hang', did not return within"):
                await pool.score(0, sample("one", "hang"))
            with pytest.raises(ValueError, match="'nan', returned score=nan"):
                await pool.score(0, sample("nan"))

    run(work)


def test_what_stops_whatever_on_error_says(workers):
    async def work():
        async with workers("whims", "too_few") as pool:
            with pytest.raises(ValueError, match=r"'too_few'.*returned 1 values for 2 completions"):
                await pool.score(1, sample("a", "b"))
            with pytest.raises(ValueError, match="'whims'.* has no words for this dataset"):
                await pool.score(0, sample("one", "cannot"))
            with pytest.raises(MegarlError, match="'whims'.* the judge is away"):
                await pool.score(0, sample("unreachable"))

    run(work)


def test_a_function_that_never_works_stops_early(workers):
    async def work():
        async with workers("whims", max_consecutive_failures=6) as pool:
            await pool.score(0, sample("raise", "raise", "raise"))
            await pool.score(0, sample("raise", "raise", "one"))
            await pool.score(0, sample("raise", "raise", "raise"))
            with pytest.raises(ValueError, match=r"(?s)failed on 6 completions in a row.*KeyError.*Traceback"):
                await pool.score(0, sample("raise", "raise", "raise"))

    run(work)


def test_functions_that_compare_are_never_called_with_one_alone(workers):
    async def work():
        async with workers("compares") as pool:
            assert (await pool.score(0, sample("a", "b"))).columns == {"score": [0.0, 1.0]}
            graded = await pool.score(0, sample("a", "raise"))
            assert graded.columns == {"score": [0.0, 0.0]} and graded.events == {"errors": 2}

    run(work)


def test_workers_work_side_by_side_and_async_functions_wait_side_by_side(workers):
    async def work():
        async with workers("waits", num_workers=3) as pool:
            started = time.monotonic()
            await asyncio.gather(*(pool.score(0, sample("a", "b", "c", "d")) for _ in range(6)))
            assert time.monotonic() - started < 6 * 0.2

    run(work)


def test_deadlines_of_functions_over_that_of_all(workers, file):
    async def work():
        async with workers("waits", "patient", timeout_seconds=0.1) as pool:
            assert (await pool.score(0, sample("a"))).events == {"timeouts": 1}
            assert not (await pool.score(1, sample("a"))).events  # it asks for 5 s itself

        impatient = {"name": f"{file}:patient", "timeout_seconds": 0.1}
        pool = RewardWorkers(RewardConfig(functions=[impatient]))
        await pool.start()
        assert (await pool.score(0, sample("a"))).events == {"timeouts": 1}
        await pool.close()

    run(work)


def test_a_killed_worker_loses_no_score(workers):
    async def work():
        async with workers("length", num_workers=1) as pool:
            await pool.score(0, sample("a"))
            for pid, _ in {one for one in descendants(os.getpid()) if "rewards.worker --ch" in command(one[0])}:
                if "supervisor" not in command(pid):
                    os.kill(pid, signal.SIGKILL)
            assert (await pool.score(0, sample("a", "abc"))).columns == {"score": [1.0, 3.0]}

    run(work)


def command(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ")


def test_a_call_that_is_given_up_leaves_no_reply_behind(workers):
    async def work():
        async with workers("waits", "length", num_workers=1) as pool:
            call = asyncio.create_task(pool.score(0, sample("a")))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert (await pool.score(1, sample("abc"))).columns == {"score": [3.0]}

    run(work)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["absent"], {}, "has no function absent"),
        (["length", "length"], {}, "reward.functions names 'length' twice"),
        (["lone"], {"kwargs": {"unit": "tokens"}}, "takes no argument 'unit' .kwargs.; it takes completions"),
    ],
)
def test_bad_functions_are_told_at_the_start(workers, names, settings, message):
    async def work():
        with pytest.raises(ValueError, match=message):
            async with workers(*names, **settings):
                pass

    run(work)


def test_a_file_that_ends_the_process_on_import(tmp_path):
    (tmp_path / "gone.py").write_text("import os\nos._exit(3)\n")

    async def work():
        pool = RewardWorkers(RewardConfig(functions=[f"{tmp_path}/gone.py:f"]))
        with pytest.raises(MegarlError, match=r"ended \(exit status 3\) while it imported f"):
            await pool.start()
        await pool.close()

    run(work)
