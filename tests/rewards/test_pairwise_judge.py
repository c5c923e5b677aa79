import asyncio

import pytest

from megarl.config.rollout import RewardConfig
from megarl.errors import MegarlError
from megarl.rewards import CannotScore
from megarl.rewards.pairwise_judge import pairwise_judge
from megarl.rewards.workers import RewardWorkers, Sample
from tests.rewards.openai_server import openai_server
from tests.rewards.test_judge import longer


def judged(texts, answer=longer, **kwargs):
    async def work():
        async with openai_server(answer) as url:
            return await pairwise_judge(texts, ["q"] * len(texts), url=url, model="judge")

    return [one["score"] for one in asyncio.run(work())]


def test_shares_of_comparisons_won():
    assert judged(["long", "s"]) == [1.0, 0.0]
    assert judged(["s", "t"]) == [0.5, 0.5]
    assert judged(["a", "aaa", "aa", "bb"]) == pytest.approx([0, 1, 0.5, 0.5])
    assert judged(["alone"]) == [0.5]
    assert judged([[{"content": "long"}], [{"content": "s"}]]) == [1.0, 0.0]


def test_a_judge_that_prefers_a_place_ties():
    async def work():
        async with openai_server(lambda text, request: "A") as url:
            return await pairwise_judge(["long", "s"], ["q"] * 2, url=url, model="judge")

    assert asyncio.run(work()) == [{"score": 0.5, "consistent": 0.0, "understood": 1.0}] * 2


def test_a_rule_reward_as_offline_judge():
    columns = {"ground_truth": ["52"] * 3, "finish_reason": ["stop"] * 3}
    graded = asyncio.run(pairwise_judge(["053", "052", "x"], ["q"] * 3, rule="arithmetic", **columns))
    assert [one["score"] for one in graded] == [0.5, 1.0, 0.0]
    tied = asyncio.run(pairwise_judge(["a", "b"], ["q"] * 2, rule="exact_match", ground_truth=["c"] * 2))
    assert [one["score"] for one in tied] == [0.5, 0.5]


RULES = """
async def awaited(completions, **columns):
    return [{"score": len(text), "letters": 1.0} for text in completions]

def bare(completions):
    return [-len(text) for text in completions]

def nan_for_b(completions):
    return [float("nan") if text == "b" else 1.0 for text in completions]

def one_for_all(completions):
    return [1.0]
"""


def test_a_rule_of_ones_own(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)

    def scores(rule):
        kwargs = {"rule": f"{tmp_path}/rules.py:{rule}", "finish_reason": ["stop"] * 2}
        return [one["score"] for one in asyncio.run(pairwise_judge(["aa", "b"], ["q"] * 2, **kwargs))]

    assert scores("awaited") == [1.0, 0.0] and scores("bare") == [0.0, 1.0]
    with pytest.raises(ValueError, match="returned score=nan, which is not a finite number"):
        scores("nan_for_b")
    with pytest.raises(CannotScore, match="one_for_all' returned 1 values for 2 completions"):
        scores("one_for_all")


def test_wrong_settings():
    for kwargs in [{}, {"url": "http://x/v1"}, {"rule": "exact_match", "url": "http://x/v1", "model": "m"}]:
        with pytest.raises(CannotScore, match="needs either rule, or url and model"):
            asyncio.run(pairwise_judge(["a", "b"], ["q"] * 2, **kwargs))


def test_in_a_worker_an_unreachable_judge_stops_the_run():
    kwargs = {"url": "http://127.0.0.1:1/v1", "model": "judge", "max_retries": 1}
    config = RewardConfig(functions=[{"name": "pairwise_judge", "kwargs": kwargs}])
    each = {"completions": ["a", "b"], "prompts": ["q"] * 2, "finish_reason": ["stop"] * 2, "completion_ids": [[1]] * 2}

    async def work():
        workers = RewardWorkers(config)
        try:
            await workers.start()
            await workers.score(0, Sample(7, "quiz", each, {}))
        finally:
            await workers.close()

    with pytest.raises(MegarlError, match=r"'pairwise_judge'.* the judge at http://127.0.0.1:1/.* 2 tries"):
        asyncio.run(work())
