"""Win rates by a rule and by a judge model: ties, places, what is not understood, and what stops."""

import asyncio

import numpy as np
import pytest

from megarl.errors import MegarlError
from megarl.judging import WinRate, by_model, by_rule, load_rule, references
from megarl.rewards.judge import Endpoint
from megarl.types import Completion, Prompt, Rollout
from tests.rewards.openai_server import openai_server
from tests.rewards.test_judge import answers_in, longer

RULES = """
async def length(completions, level, **columns):
    return [{"score": len(text), "acc": level[0]} for text in completions]

def one(completions):
    return [1.0]

def nan(completions):
    return [float("nan")] * 2

def raises(completions):
    raise KeyError("x")

def asks(completions, difficulty):
    return [0.0] * 2
"""


def rollout(text: str, **columns) -> Rollout:
    one = np.ones(1, np.int32)
    completion = Completion(one, one.astype(np.float32), "stop", one.astype(np.uint8), one)
    return Rollout(Prompt(7, one, "q", "0", columns=columns), [completion], np.zeros(1), {}, [text])


OURS, THEIRS = [rollout(text, level=1) for text in ("long", "s", "ab", "longer")], ["s", "long", "cd", "l"]


@pytest.fixture
def rules(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(RULES)
    return lambda name: load_rule(f"{file}:{name}")


def test_the_higher_score_wins_and_a_tie_is_half_a_win(rules):
    found = by_rule(OURS, THEIRS, rules("length"))
    assert (found.rate, found.ties, found.inconsistent, found.unclear, found.prompts) == (2.5 / 4, 1, 0, 0, 4)
    assert found.low <= found.rate <= found.high


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("one", "on prompt 7, returned 1 values for 2 completions"),
        ("nan", "on prompt 7, returned score=nan, which is not a finite number"),
        ("raises", "on prompt 7, KeyError: 'x'"),
        ("asks", "needs a column 'difficulty', which the dataset does not have"),
    ],
)
def test_a_rule_that_does_not_score_is_named(rules, rule, message):
    with pytest.raises(ValueError, match=f"the rule .*{rule}.*{message}"):
        by_rule(OURS, THEIRS, rules(rule))


def judged(answer) -> WinRate:
    async def work():
        async with openai_server(answer) as url:
            return await asyncio.to_thread(by_model, OURS, THEIRS, Endpoint(url, "judge"))

    return asyncio.run(work())


def test_a_judge_model_is_asked_in_both_orders():
    asked = []

    def answer(text, request):
        asked.append(answers_in(text))
        return longer(text, request)

    found = judged(answer)
    assert (found.rate, found.ties, found.inconsistent, found.unclear) == (2.5 / 4, 1, 0, 0)
    assert sorted(asked) == sorted(
        [*zip(["long", "s", "ab", "longer"], THEIRS), *zip(THEIRS, ["long", "s", "ab", "longer"])]
    )


def test_a_judge_that_names_the_place_or_nothing_has_said_nothing():
    place, nothing = judged(lambda text, request: "A"), judged(lambda text, request: "no idea")
    assert (place.rate, place.ties, place.inconsistent, place.unclear) == (0.5, 4, 4, 0)
    assert (nothing.rate, nothing.ties, nothing.inconsistent, nothing.unclear) == (0.5, 4, 0, 4)


def test_a_judge_that_cannot_be_reached_stops():
    with pytest.raises(
        MegarlError, match="the judge at http://127.0.0.1:1/v1/chat/completions cannot be reached: 1 tr"
    ):
        by_model(OURS, THEIRS, Endpoint("http://127.0.0.1:1/v1", "judge", max_retries=0))


def test_references():
    assert references(OURS, "ground_truth") == ["0"] * 4 and references(OURS, "level") == ["1"] * 4
    with pytest.raises(ValueError, match="row 7 .* no column 'best'; it has: ground_truth, level"):
        references(OURS, "best")
