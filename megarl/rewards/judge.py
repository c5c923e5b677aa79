"""Judges: which of two answers is better, or how good one is; asked over an OpenAI-compatible endpoint.

A verdict between two answers is asked for twice, with the answers in either place: a judge that names the place and not
the answer has said nothing, which counts as a tie.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.errors import MegarlError
from megarl.rewards import CannotScore

_FIRST_PAUSE_SECONDS = 0.5
_PAIR = """You compare two answers to one question. Judge how correct, helpful and clear they are; neither their order \
nor their length matters.

[Question]
{question}

[Answer A]
{first}

[Answer B]
{second}

Which answer is better? Reply with one word: A, B, or TIE."""
_PAIR_FIELDS = ("question", "first", "second")
_GRADE = """You grade an answer to a question. Judge how correct, helpful and clear it is.

[Question]
{question}

[Answer]
{answer}

Reply with one line, "Score: N", where N is a number from 0 (useless) to 10 (perfect)."""
_GRADE_FIELDS = ("question", "answer", "ground_truth")


@dataclass(frozen=True)
class Endpoint:
    """Where a judge is asked, and how often.

    `url` is the base of an OpenAI-compatible API ("http://host:8000/v1"), `key_env` names the environment variable that
    holds its key; `api` is "chat" (/chat/completions) or "completions" (/completions).
    """

    url: str
    model: str
    key_env: str | None = None
    api: str = "chat"
    max_tokens: int = 16
    max_concurrent: int = 16
    request_timeout_seconds: float = 60.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        if self.api not in ("chat", "completions"):
            raise CannotScore(f"a judge has api={self.api!r}; write api: chat or api: completions")
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise CannotScore(
                f"the judge's key_env names the environment variable {self.key_env}, which is not set; set it to the "
                f"key of {self.url}"
            )


@dataclass(frozen=True)
class Verdict:
    """What a judge said of two answers, asked in both orders."""

    first_wins: float  # 1.0, 0.0, or 0.5 for a tie
    consistent: bool  # both orders gave the same winner, or a tie
    understood: bool  # both replies named a winner or a tie


class Judge:
    """Asks one endpoint; `async with Judge(endpoint) as judge`. Methods raise MegarlError when it cannot answer."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._turn = asyncio.Semaphore(endpoint.max_concurrent)

    async def __aenter__(self) -> Judge:
        key = os.environ[self._endpoint.key_env] if self._endpoint.key_env else None
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=self._endpoint.request_timeout_seconds),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def compare(self, question: str, first: str, second: str, template: str | None = None) -> Verdict:
        """Which answer is better. `template` holds {question}, {first} and {second} and asks for A, B or TIE."""
        form = checked_template(template or _PAIR, _PAIR_FIELDS, {"first", "second"})
        replies = await asyncio.gather(
            self.ask(_filled(form, question=question, first=first, second=second)),
            self.ask(_filled(form, question=question, first=second, second=first)),
        )
        straight, swapped = map(_winner, replies)
        understood = straight is not None and swapped is not None
        straight, swapped = straight or "TIE", {"A": "B", "B": "A"}.get(swapped or "TIE", "TIE")
        value = {"A": 1.0, "B": 0.0, "TIE": 0.5}[straight] if straight == swapped else 0.5
        return Verdict(value, straight == swapped, understood)

    async def grade(
        self, question: str, answer: str, ground_truth: str = "", template: str | None = None
    ) -> float | None:
        """The number in the judge's reply; None without one. `template` holds {answer}, and may hold {question} and
        {ground_truth}; it should ask for "Score: N"."""
        form = checked_template(template or _GRADE, _GRADE_FIELDS, {"answer"})
        reply = await self.ask(_filled(form, question=question, answer=answer, ground_truth=ground_truth))
        marked = re.findall(r"(?i)score\W*?(-?\d+(?:\.\d+)?)", reply)
        numbers = marked or re.findall(r"-?\d+(?:\.\d+)?", reply)
        return float(numbers[-1]) if numbers else None

    async def ask(self, text: str) -> str:
        """The judge's reply at temperature 0.

        Tries again, `max_retries` times at most and after a longer pause each time, when the endpoint cannot be
        reached, takes too long, or answers 429 or 5xx. Raises MegarlError then, and at once when it refuses.
        """
        end = self._endpoint
        said: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if end.api == "chat" else {"prompt": text}
        )
        body = {"model": end.model, "temperature": 0.0, "max_tokens": end.max_tokens} | said
        url = f"{end.url.rstrip('/')}/{'chat/completions' if end.api == 'chat' else 'completions'}"
        for attempt in range(end.max_retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                async with self._turn, self._session.post(url, json=body) as response:
                    if response.status == 200:
                        return _reply(url, await response.json(content_type=None))
                    failure = f"HTTP {response.status}: {(await response.text())[:300]}"
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}".removesuffix(": ")
                continue
            if response.status != 429 and response.status < 500:
                raise MegarlError(f"the judge at {url} refuses: {failure}")
        raise MegarlError(f"the judge at {url} cannot be reached: {end.max_retries + 1} tries, the last: {failure}")


def text_of_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as a judge reads it: a single message without its role, a conversation as "role: content" paragraphs."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def checked_template(template: str, known: tuple[str, ...], needed: set[str]) -> str:
    """The template. CannotScore when one of the fields that it needs is not in it."""
    missing = [name for name in known if name in needed and f"{{{name}}}" not in template]
    if missing:
        raise CannotScore(f"the judge's template lacks {{{missing[0]}}}; it may hold {', '.join(known)}, in braces")
    return template


def _filled(template: str, **values: str) -> str:
    """The fields in one pass: answers hold braces of their own."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def _winner(reply: str) -> str | None:
    """A, B or TIE, as the first such word of a reply, or its last when it reasons first; None without one."""
    words = re.findall(r"\b(A|B|TIE|Tie|tie)\b", reply)
    if not words:
        return None
    word = words[0] if len(reply.split()) <= 3 else words[-1]
    return word.upper()


def _reply(url: str, answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    except (KeyError, IndexError, TypeError):
        raise MegarlError(
            f"the judge at {url} answered something else than a completion: {str(answer)[:300]}"
        ) from None
