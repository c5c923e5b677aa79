"""Programs on a Sandbox Fusion server (https://github.com/bytedance/SandboxFusion): POST to its `run_code` URL."""

from __future__ import annotations

import asyncio

import aiohttp

from megarl.rewards.sandbox import Limits, Outcome

_GRACE_SECONDS = 10.0  # for the server's queue and the network, beyond the program's time
_FIRST_PAUSE_SECONDS = 0.5
_STATUSES = {"Finished": "ok", "TimeLimitExceeded": "timeout", "Error": "failed"}


class SandboxUnavailable(Exception):
    """The server gave no usable answer: the completion has no score."""


async def run(
    session: aiohttp.ClientSession, url: str, source: str, stdin: str, limits: Limits, max_retries: int
) -> Outcome:
    """Run a Python program with a given stdin on the server at `url` (".../run_code").

    Sends `limits.wall_seconds` and `limits.memory_mib`; the others are the server's own. Tries again, `max_retries`
    times at most and after a longer pause each time, when the server does not answer, answers 5xx or 429, or reports an
    error of its own.

    Raises:
        SandboxUnavailable: no try succeeded, or the server refuses the request.
    """
    body = {
        "code": source,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.wall_seconds,
        "run_timeout": limits.wall_seconds,
        "memory_limit_MB": limits.memory_mib,
        "files": {},
        "fetch_files": [],
    }
    timeout = aiohttp.ClientTimeout(total=limits.wall_seconds + _GRACE_SECONDS)
    for attempt in range(max_retries + 1):
        if attempt:
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            async with session.post(url, json=body, timeout=timeout) as response:
                if response.status in (429, *range(500, 600)):
                    failure = f"HTTP {response.status}"
                    continue
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise SandboxUnavailable(f"the sandbox at {url} refuses (HTTP {response.status}): {text}")
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        result = answer.get("run_result") if isinstance(answer, dict) else None
        if answer and answer.get("status") in ("Success", "Failed") and isinstance(result, dict):
            return _outcome(result)
        failure = (
            f"status {answer.get('status')!r}: {answer.get('message')}" if isinstance(answer, dict) else "no object"
        )
    raise SandboxUnavailable(f"the sandbox at {url} gave no answer in {max_retries + 1} tries; the last: {failure}")


def _outcome(result: dict) -> Outcome:
    stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    status = _STATUSES.get(str(result.get("status")), "failed")
    if status == "ok" and result.get("return_code") not in (0, None):
        status = "failed"
    detail = stderr.strip().rpartition("\n")[2][:300]
    return Outcome(status, detail, stdout, stderr, float(result.get("execution_time") or 0.0))
