import asyncio
import re
import time

import pytest
from aiohttp import web

from megarl.errors import MegarlError
from megarl.rewards import CannotScore
from megarl.rewards.judge import Endpoint, Judge, Verdict, text_of_prompt
from tests.rewards.openai_server import openai_server


def asked(answer, use, **settings):
    """`use(judge)` beside a server that replies with `answer(text, request)`."""

    async def work():
        async with openai_server(answer) as url, Judge(Endpoint(url, "judge", **settings)) as judge:
            return await use(judge)

    return asyncio.run(work())


def answers_in(text):
    return re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\nWhich", text).groups()


def longer(text, request):
    first, second = answers_in(text)
    return "TIE" if len(first) == len(second) else "AB"[len(first) < len(second)]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_fair_judge_is_believed(api):
    async def use(judge):
        return [await judge.compare("q", *pair) for pair in [("long", "s"), ("s", "long"), ("aa", "bb")]]

    assert asked(longer, use, api=api) == [Verdict(1.0, True, True), Verdict(0.0, True, True), Verdict(0.5, True, True)]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A", Verdict(0.5, False, True)),
        ("B.", Verdict(0.5, False, True)),
        ("Answer: TIE", Verdict(0.5, True, True)),
        ("I cannot say", Verdict(0.5, True, False)),
        ("", Verdict(0.5, True, False)),
    ],
)
def test_a_judge_that_prefers_a_place_has_said_nothing(reply, verdict):
    assert asked(lambda text, request: reply, lambda judge: judge.compare("q", "x", "y")) == verdict


def test_a_judge_that_reasons_first():
    def answer(text, request):
        return f"Answer A is short and B is long, so the better one is {longer(text, request)}"

    assert asked(answer, lambda judge: judge.compare("q", "long", "s")).first_wins == 1.0


def test_answers_with_braces_and_own_templates():
    seen = []

    def answer(text, request):
        seen.append(text)
        return "A"

    asked(answer, lambda judge: judge.compare("{first}", "{second}", "{}", "{question}|{first}|{second}|{other}"))
    assert sorted(seen) == ["{first}|{second}|{}|{other}", "{first}|{}|{second}|{other}"]
    with pytest.raises(CannotScore, match="template lacks {second}; it may hold question, first, second"):
        asked(answer, lambda judge: judge.compare("q", "a", "b", "{question} {first}"))


@pytest.mark.parametrize(
    ("reply", "grade"),
    [("Score: 7", 7), ("7.5", 7.5), ("2 flaws.\n**Score**: 8/10", 8), ("score=-1", -1), ("good", None), ("", None)],
)
def test_grades(reply, grade):
    assert asked(lambda text, request: reply, lambda judge: judge.grade("q", "a")) == grade


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    told = []

    def answer(text, request):
        told.append(request.headers.get("Authorization"))
        return "A"

    asked(answer, lambda judge: judge.ask("q"), key_env="JUDGE_KEY")
    asked(answer, lambda judge: judge.ask("q"))
    assert told == ["Bearer s3cret", None]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(CannotScore, match="environment variable JUDGE_KEY, which is not set"):
        Endpoint("http://x/v1", "m", key_env="JUDGE_KEY")
    with pytest.raises(CannotScore, match="api='chats'; write api: chat or api: completions"):
        Endpoint("http://x/v1", "m", api="chats")


def test_an_endpoint_that_comes_back():
    tries = []

    async def later():
        await asyncio.sleep(0.5)
        return web.Response(status=200)

    def answer(text, request):
        tries.append(1)
        return (
            later()
            if len(tries) == 3
            else [web.Response(status=503), web.Response(status=429), None, "A"][len(tries) - 1]
        )

    reply = asked(answer, lambda judge: judge.ask("q"), max_retries=3, request_timeout_seconds=0.2)
    assert reply == "A" and len(tries) == 4


def test_an_endpoint_that_does_not():
    async def hangs():
        await asyncio.sleep(5)

    def ask(judge):
        return judge.ask("q")

    started = time.monotonic()
    with pytest.raises(MegarlError, match=r"cannot be reached: 2 tries, the last: TimeoutError"):
        asked(lambda text, request: hangs(), ask, max_retries=1, request_timeout_seconds=0.2)
    with pytest.raises(MegarlError, match="cannot be reached: 1 tries, the last: HTTP 500: out of memory"):
        asked(lambda text, request: web.Response(status=500, text="out of memory"), ask, max_retries=0)
    with pytest.raises(MegarlError, match="refuses: HTTP 404: no such model"):
        asked(lambda text, request: web.Response(status=404, text="no such model"), ask)
    with pytest.raises(MegarlError, match="answered something else than a completion: {'object': 'list'}"):
        asked(lambda text, request: web.json_response({"object": "list"}), ask)

    async def nobody_there():
        async with Judge(Endpoint("http://127.0.0.1:1/v1", "m", max_retries=1)) as judge:
            await judge.ask("q")

    with pytest.raises(MegarlError, match=r"127.0.0.1:1/v1/chat/completions cannot be reached: 2 tries, the last: Cl"):
        asyncio.run(nobody_there())
    assert time.monotonic() - started < 4


def test_no_more_requests_at_once_than_allowed():
    now, most = [0], [0]

    async def slow():
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.05)
        now[0] -= 1
        return web.json_response({"choices": [{"text": "A"}]})

    async def use(judge):
        await asyncio.gather(*(judge.ask("q") for _ in range(9)))

    asked(lambda text, request: slow(), use, max_concurrent=3)
    assert most == [3]


def test_text_of_prompt():
    user = {"role": "user", "content": "q"}
    assert text_of_prompt("q") == text_of_prompt([user]) == "q"
    assert text_of_prompt([{"role": "system", "content": "s"}, user]) == "system: s\n\nuser: q"
