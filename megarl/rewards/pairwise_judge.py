"""A prompt's completions against each other: each scores the share of its comparisons that it wins."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

from megarl import rewards
from megarl.rewards.judge import Endpoint, Judge, text_of_prompt
from megarl.rewards.text import Text, text_of
from megarl.rewards.worker import Refused, checked, takes


async def pairwise_judge(
    completions: list[Text],
    prompts: list[Any],
    rule: str | None = None,
    template: str | None = None,
    url: str | None = None,
    model: str | None = None,
    key_env: str | None = None,
    api: str = "chat",
    max_tokens: int = 16,
    max_concurrent: int = 16,
    request_timeout_seconds: float = 60.0,
    max_retries: int = 2,
    **columns: list,
) -> list[dict[str, float]]:
    """score: wins plus half the ties, over the other completions; 0.5 where there is no other.

    Either a judge model behind an OpenAI-compatible endpoint compares each pair in both orders (n (n - 1) requests for
    n completions; meant for pairs), or, offline, the scores of another reward function do. `consistent`: the share of
    a completion's comparisons in which both orders agreed; `understood`: in which both replies named a winner or a tie.

    Args:
        rule: a reward function, by its name or as path/to/file.py:function, whose higher score wins.
        url, model, key_env, api, max_tokens, max_concurrent, request_timeout_seconds, max_retries: the judge.Endpoint.
        template: what the judge is told, with {question}, {first} and {second}; it asks for A, B or TIE.

    Raises:
        CannotScore: neither rule nor url and model, or both; a rule that does not return one score per completion.
        ValueError: a score of the rule is no finite number.
        MegarlError: the judge cannot be reached.
    """
    texts = [text_of(completion) for completion in completions]
    pairs = [(a, b) for a in range(len(texts)) for b in range(a)]
    if (rule is None) == (url is None or model is None):
        raise rewards.CannotScore("pairwise_judge needs either rule, or url and model (kwargs of the reward function)")
    if rule is not None:
        values = await _scores(rule, completions=completions, prompts=prompts, **columns)
        first_wins = [0.5 + 0.5 * ((values[a] > values[b]) - (values[a] < values[b])) for a, b in pairs]
        agreed = [(1.0, 1.0)] * len(pairs)
    else:
        endpoint = Endpoint(url, model, key_env, api, max_tokens, max_concurrent, request_timeout_seconds, max_retries)
        async with Judge(endpoint) as judge:
            question = text_of_prompt(prompts[0])
            work = [judge.compare(question, texts[a], texts[b], template) for a, b in pairs]
            verdicts = await asyncio.gather(*work)
        first_wins = [verdict.first_wins for verdict in verdicts]
        agreed = [(float(verdict.consistent), float(verdict.understood)) for verdict in verdicts]
    return [_summary(place, pairs, first_wins, agreed) for place in range(len(texts))]


async def _scores(rule: str, **arguments: list) -> list[float]:
    """The rule's score of each completion: what is not one number for each would decide comparisons by chance."""
    function = rewards.get(SimpleNamespace(name=rule))
    values = function(**{name: value for name, value in arguments.items() if takes(function, name)})
    reply = checked(await values if inspect.isawaitable(values) else values, len(arguments["completions"]))
    if isinstance(reply, Refused):
        raise rewards.CannotScore(f"pairwise_judge: the rule {rule!r} {reply.message}")
    if reply.invalid:
        raise ValueError(f"the rule {rule!r} returned {next(iter(reply.invalid.values()))}")
    return reply.columns["score"]


# One completion alone cannot be compared, and one comparison takes several requests.
pairwise_judge.compares_completions = True
pairwise_judge.timeout_seconds = 300.0


def _summary(
    place: int, pairs: list[tuple[int, int]], first_wins: list[float], agreed: list[tuple[float, float]]
) -> dict[str, float]:
    mine = [k for k, pair in enumerate(pairs) if place in pair]
    if not mine:
        return {"score": 0.5, "consistent": 1.0, "understood": 1.0}
    won = [first_wins[k] if pairs[k][0] == place else 1.0 - first_wins[k] for k in mine]
    consistent, understood = (sum(agreed[k][which] for k in mine) / len(mine) for which in (0, 1))
    return {"score": sum(won) / len(mine), "consistent": consistent, "understood": understood}
