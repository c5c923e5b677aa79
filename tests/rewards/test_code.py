"""Programs scored by their tests, in real sandboxes and on a local server that speaks Sandbox Fusion's protocol."""

import asyncio
import json
import os

import pytest
from aiohttp import web

from megarl.rewards import CannotScore, sandbox
from megarl.rewards.code import Test, code, program_of, suite_of
from megarl.rewards.sandbox_fusion import SandboxUnavailable

SQUARES = {"inputs": ["2\n", "3\n", "-4\n"], "outputs": ["4\n", "9", "16  \n\n"]}
ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]


def grade(completions, truth, **kwargs):
    return asyncio.run(code(completions=completions, ground_truth=[truth] * len(completions), **kwargs))


def test_share_of_tests_passed():
    right = "I square it.\n```python\nprint(int(input()) ** 2)\n```\nDone."
    half = "```\nn = int(input())\nprint(n * n if n > 0 else n)\n```"
    graded = grade([right, half, "no program at all", [{"content": right}]], json.dumps(SQUARES))
    assert [one["score"] for one in graded] == pytest.approx([1, 2 / 3, 0, 1])
    assert [one["acc"] for one in graded] == [1, 0, 0, 1] and not any(one["stopped"] for one in graded)
    assert {one["isolated"] for one in graded} == {float(not asyncio.run(sandbox.missing()))}
    assert [one["score"] for one in grade([right, half], SQUARES, continuous=False)] == [1.0, 0.0]
    assert grade([half], SQUARES, max_tests=2)[0]["score"] == 1.0


def test_asserts():
    programs = ["def f(x): return x * x", "def f(x): return 2 * x", "def f(x): return x * x\nraise SystemExit(0)"]
    for truth in (ASSERTS, {"assert_case": ASSERTS}, json.dumps(ASSERTS)):
        assert [one["score"] for one in grade(programs, truth)] == [1.0, 0.5, 0.0]
    assert grade(["def f(x): return 1"], "assert f(1) == 1")[0]["acc"] == 1.0
    assert grade(["import os\nprint()\nos._exit(0)"], ASSERTS)[0]["score"] == 0.0


def test_a_program_that_is_stopped_is_not_run_on_the_other_tests():
    endless = "if int(input()) > 2:\n  while True: pass\nprint(4)"
    graded = grade([endless], SQUARES, test_timeout_seconds=0.5)[0]
    assert graded["score"] == pytest.approx(1 / 3) and graded["stopped"] == 1.0
    eats = grade(["x = []\nwhile True: x.append(bytearray(1 << 22))"], SQUARES, memory_limit_mb=128)[0]
    assert (eats["score"], eats["stopped"]) == (0.0, 1.0)


def test_the_program_of_a_completion():
    assert program_of("print(1)") == "print(1)"
    assert program_of("```python\na\n```\nor\n```py\nb\n```") == "b\n"
    assert program_of("```python\nunfinished") == "```python\nunfinished"


def test_ground_truths():
    assert suite_of({"inputs": [["1", "2"]], "outputs": [3]}) == [Test(stdin="1\n2", expected="3")]
    assert suite_of(ASSERTS) == [Test(statements=one) for one in ASSERTS]
    for wrong in [
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]},
        {},
        [],
        "",
        [1],
        None,
        3,
    ]:
        with pytest.raises(CannotScore, match="needs tests as ground truth"):
            suite_of(wrong)


def with_server(answer, use):
    """Run `use(url)` beside an HTTP server whose run_code calls `answer(body)`."""

    async def work():
        async def run_code(request):
            return await answer(await request.json())

        app = web.Application()
        app.router.add_post("/run_code", run_code)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await use(f"http://127.0.0.1:{runner.addresses[0][1]}/run_code")
        finally:
            await runner.cleanup()

    return asyncio.run(work())


def test_sandbox_fusion_server():
    """The server runs the programs for real and is unwell now and then."""
    calls, at_once = [], []

    async def answer(body):
        calls.append(body)
        at_once.append(1)
        if len(calls) == 1:
            at_once.pop()
            return web.Response(status=504)
        if len(calls) == 2:
            at_once.pop()
            return web.json_response({"status": "SandboxError", "message": "no pod"})
        assert len(at_once) <= 3
        limits = sandbox.Limits(wall_seconds=body["run_timeout"], memory_mib=body["memory_limit_MB"])
        outcome = await sandbox.run(body["code"], body["stdin"], limits)
        at_once.pop()
        kind = {"ok": "Finished", "failed": "Finished", "timeout": "TimeLimitExceeded"}[outcome.status]
        result = {"status": kind, "return_code": int(outcome.status != "ok"), "execution_time": outcome.seconds}
        result |= {"stdout": outcome.stdout, "stderr": outcome.stderr}
        status = "Success" if outcome.status == "ok" else "Failed"
        return web.json_response({"status": status, "message": "", "compile_result": None, "run_result": result})

    programs = ["print(int(input()) ** 2)", "print(4)", "raise ValueError", "import time\ntime.sleep(60)"]

    async def use(url):
        truth = [SQUARES] * len(programs)
        return await code(programs, truth, url=url, max_concurrent=3, test_timeout_seconds=1, memory_limit_mb=256)

    graded = with_server(answer, use)
    assert [one["score"] for one in graded] == pytest.approx([1, 1 / 3, 0, 0])
    assert [one["stopped"] for one in graded] == [0, 0, 0, 1] and all(one["isolated"] for one in graded)
    assert calls[0]["language"] == "python" and (calls[0]["run_timeout"], calls[0]["memory_limit_MB"]) == (1, 256)


def test_a_dead_sandbox_is_a_named_failure():
    async def broken(body):
        return web.Response(status=503)

    async def confused(body):
        return web.Response(text="<html>")

    async def refusing(body):
        return web.Response(status=401, text="no key")

    async def use(url):
        return await code(["a"], [SQUARES], url=url, max_retries=1)

    for answer, message in [
        (broken, "gave no answer in 2 tries; the last: HTTP 503"),
        (confused, "gave no answer in 2 tries; the last: JSONDecodeError"),
        (refusing, r"refuses \(HTTP 401\): no key"),
    ]:
        with pytest.raises(SandboxUnavailable, match=message):
            with_server(answer, use)
    with pytest.raises(SandboxUnavailable, match="gave no answer in 1 tries; the last: ClientConnectorError"):
        asyncio.run(code(["a"], [SQUARES], url="http://127.0.0.1:1/run_code", max_retries=0))


def test_a_hanging_sandbox_is_given_up(monkeypatch):
    monkeypatch.setattr("megarl.rewards.sandbox_fusion._GRACE_SECONDS", 0.2)

    async def hangs(body):
        await asyncio.sleep(1)

    async def use(url):
        return await code(["a"], [SQUARES], url=url, max_retries=1, test_timeout_seconds=0.1)

    with pytest.raises(SandboxUnavailable, match="in 2 tries; the last: TimeoutError"):
        with_server(hangs, use)


def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert os.environ["HTTP_PROXY"]

    async def answer(body):
        result = {"status": "Finished", "return_code": 0, "stdout": "4", "stderr": "", "execution_time": 0.1}
        return web.json_response({"status": "Success", "run_result": result})

    async def use(url):
        return await code(["a"], [{"inputs": [""], "outputs": ["4"]}], url=url)

    assert with_server(answer, use)[0]["score"] == 1.0
