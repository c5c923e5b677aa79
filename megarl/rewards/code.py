"""Programs scored by their tests, each run in a sandbox: here (rewards/sandbox.py) or on a Sandbox Fusion server."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.rewards import CannotScore, sandbox, sandbox_fusion
from megarl.rewards.sandbox import Limits, Outcome
from megarl.rewards.text import Text, text_of

_STOPPED = set(sandbox.STATUSES) - {"ok", "failed"}  # by a limit or a signal
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

Runner = Callable[[str, str], Awaitable[Outcome]]  # (source, stdin)


@dataclass(frozen=True)
class Test:
    """Either a stdin and the stdout that it must give, or statements that must not raise."""

    __test__ = False  # for pytest, which takes the name for its own

    stdin: str = ""
    expected: str = ""
    statements: str = ""


async def code(
    completions: list[Text],
    ground_truth: list[Any],
    continuous: bool = True,
    test_timeout_seconds: float = 5.0,
    memory_limit_mb: int = 512,
    max_concurrent: int = 4,
    max_tests: int | None = None,
    url: str | None = None,
    max_retries: int = 3,
    **columns: list,
) -> list[dict[str, float]]:
    """score: the share of the tests that the program passes, or with `continuous` false 1.0 for all of them, else 0.0.

    The program is the last fenced block of Python in the completion, or all of it without a fence. After a test in
    which it was stopped by a limit, its further tests count as failed and are not run. Besides the score: `acc` (1.0:
    all passed), `stopped` (1.0: a limit or a signal ended a test), `isolated` (1.0: in namespaces, or on a server).

    Args:
        ground_truth: tests, as an object or as its JSON: {"inputs": [...], "outputs": [...]}, stdin and stdout of each
            test (verl's prime format); or {"assert_case": [...]}, or a list, of Python statements such as asserts, run
            after the program. stdouts are equal when their lines are, up to white space at the end of each.
        test_timeout_seconds, memory_limit_mb: what one test may take.
        max_concurrent: tests at once in this worker.
        max_tests: run only the first so many of each prompt. Default: all.
        url: the `run_code` URL of a Sandbox Fusion server. Default: run here.
        max_retries: tries after the first, when the server does not answer.

    Raises:
        CannotScore: a ground truth is no such object.
        SandboxUnavailable: the server gives no answer.
        MegarlError: this machine allows no sandbox.
    """
    limits = Limits(
        wall_seconds=test_timeout_seconds, cpu_seconds=int(test_timeout_seconds) + 1, memory_mib=memory_limit_mb
    )
    suites = [suite_of(truth)[:max_tests] for truth in ground_truth]
    turn = asyncio.Semaphore(max_concurrent)
    async with aiohttp.ClientSession() as session:
        isolated = True

        async def run(source: str, stdin: str) -> Outcome:
            async with turn:
                if url is None:
                    return await sandbox.run(source, stdin, limits)
                return await sandbox_fusion.run(session, url, source, stdin, limits, max_retries)

        if url is None and (missing := await sandbox.missing()):
            isolated = False
            print(f"WARNING: code reward: {missing}", file=sys.stderr, flush=True)
        pairs = zip(completions, suites, strict=True)
        work = [_grade(program_of(text_of(completion)), tests, run) for completion, tests in pairs]
        results = await asyncio.gather(*work)
    return [
        {
            "score": passed if continuous else float(passed == 1.0),
            "acc": float(passed == 1.0),
            "stopped": float(stopped),
            "isolated": float(isolated),
        }
        for passed, stopped in results
    ]


code.timeout_seconds = 300.0  # a call runs many programs, each with its own deadline


def program_of(text: str) -> str:
    """The last fenced block of Python in a text, or the whole text without one."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def suite_of(truth: Any) -> list[Test]:
    """The tests that a ground truth describes. CannotScore when it describes none."""
    try:
        tests = json.loads(truth) if isinstance(truth, str) else truth
    except json.JSONDecodeError:
        tests = [truth]  # statements as they are
    if isinstance(tests, dict) and "fn_name" not in tests:
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            return [Test(stdin=_lines(one), expected=_lines(out)) for one, out in zip(inputs, outputs, strict=True)]
        tests = tests.get("assert_case")
    if isinstance(tests, list) and tests and all(isinstance(one, str) and one.strip() for one in tests):
        return [Test(statements=one) for one in tests]
    raise CannotScore(
        'the code reward needs tests as ground truth: {"inputs": [...], "outputs": [...]} of equal lengths, or a list '
        f"of asserts (calls by fn_name are not supported: write asserts); got {str(truth)[:200]}"
    )


async def _grade(program: str, tests: list[Test], run: Runner) -> tuple[float, bool]:
    """(share of the tests passed, whether one was stopped)."""
    passed = 0
    for test in tests:
        ok, outcome = await _passes(program, test, run)
        if outcome.status in _STOPPED:
            return passed / len(tests), True
        passed += ok
    return passed / len(tests), False


async def _passes(program: str, test: Test, run: Runner) -> tuple[bool, Outcome]:
    if not test.statements:
        outcome = await run(program, test.stdin)
        return outcome.status == "ok" and _visible(outcome.stdout) == _visible(test.expected), outcome
    # A program that exits before the statements run must not pass. (One that looks for this word in its own file does:
    # nothing within one process can be hidden from it.)
    word = secrets.token_hex(8)
    outcome = await run(f"{program}\n\n{test.statements}\nprint()\nprint({word!r})\n", "")
    return outcome.status == "ok" and outcome.stdout.rstrip("\n").rpartition("\n")[2] == word, outcome


def _visible(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
