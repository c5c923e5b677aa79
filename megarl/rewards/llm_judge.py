"""A judge model's grade of each completion, over an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from megarl.rewards.judge import Endpoint, Judge, text_of_prompt
from megarl.rewards.text import Text, text_of


async def llm_judge(
    completions: list[Text],
    prompts: list[Any],
    url: str,
    model: str,
    ground_truth: list[Any] | None = None,
    template: str | None = None,
    best: float = 10.0,
    key_env: str | None = None,
    api: str = "chat",
    max_tokens: int = 16,
    max_concurrent: int = 16,
    request_timeout_seconds: float = 60.0,
    max_retries: int = 2,
    **columns: list,
) -> list[float]:
    """The judge's number over `best`, held in [0, 1]; NaN, a failure of kind "invalid", where its reply has none.

    Args:
        template: what the judge is told, with {answer}, and {question} and {ground_truth} where wanted.
        best: the best number that the template allows.
        url, model, key_env, api, max_tokens, max_concurrent, request_timeout_seconds, max_retries: the judge.Endpoint.

    Raises:
        CannotScore: the template or the endpoint's settings are wrong.
        MegarlError: the judge cannot be reached.
    """
    truths = ["" if truth is None else str(truth) for truth in ground_truth or [None] * len(completions)]
    endpoint = Endpoint(url, model, key_env, api, max_tokens, max_concurrent, request_timeout_seconds, max_retries)
    async with Judge(endpoint) as judge:
        asked = zip(prompts, completions, truths, strict=True)
        work = [judge.grade(text_of_prompt(prompt), text_of(one), truth, template) for prompt, one, truth in asked]
        grades = await asyncio.gather(*work)
    return [float("nan") if grade is None else min(max(grade / best, 0.0), 1.0) for grade in grades]


llm_judge.timeout_seconds = 300.0
