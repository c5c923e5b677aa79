import asyncio
import math

from megarl.rewards.llm_judge import llm_judge
from tests.rewards.openai_server import openai_server


def graded(answer, texts, **kwargs):
    async def work():
        async with openai_server(answer) as url:
            return await llm_judge(texts, [[{"role": "user", "content": "q"}]] * len(texts), url, "judge", **kwargs)

    return asyncio.run(work())


def test_numbers_between_zero_and_one():
    def answer(text, request):
        return {"good": "Score: 9", "more": "Score: 11", "bad": "-3"}.get(text.split("\n\n")[-2].split("\n")[1], "?")

    scores = graded(answer, ["good", [{"content": "more"}], "bad", "other"])
    assert scores[:3] == [0.9, 1.0, 0.0] and math.isnan(scores[3])


def test_own_templates_see_the_ground_truth():
    def answer(text, request):
        question, given, truth = text.split("|")
        assert question == "q"
        return "5" if given == truth else "0"

    template = "{question}|{answer}|{ground_truth}"
    assert graded(answer, ["4", "x"], ground_truth=[4, None], template=template, best=5) == [1.0, 0.0]
