"""What a worker makes of a call, without the process around it."""

import numpy as np
import pytest

from megarl.rewards.worker import Function, Raised, Refused, Scored, answer, checked, load

EACH = {
    "completions": ["yes", "no"],
    "prompts": [[{"role": "user", "content": "q"}]] * 2,
    "finish_reason": ["stop", "length"],
    "completion_ids": [[5, 1], [6]],
}


def spec(conversational=False, **kwargs):
    return Function("rule", kwargs, conversational)


def test_columns_are_repeated_and_a_function_gets_what_it_names():
    def everything(completions, prompts, ground_truth, finish_reason, completion_ids, data_source, level):
        assert prompts == EACH["prompts"] and finish_reason == ["stop", "length"] and completion_ids == [[5, 1], [6]]
        assert data_source == ["quiz"] * 2 and level == [5] * 2
        return [{"score": float(text == truth), "length": len(text)} for text, truth in zip(completions, ground_truth)]

    shared = {"data_source": "quiz", "ground_truth": "yes", "level": 5, "not asked for": None}
    reply = answer(everything, spec(), EACH, shared)
    assert reply == Scored({"score": [1.0, 0.0], "length": [3.0, 2.0]}, {})
    assert answer(lambda completions: [0, True], spec(), EACH, shared).columns == {"score": [0.0, 1.0]}
    assert answer(lambda **columns: [len(columns)] * 2, spec(), EACH, shared).columns == {"score": [8.0] * 2}


def test_trl_style_completions_and_kwargs():
    def reward(completions, unit="chars", **columns):
        return [len(completion[0]["content"]) if unit == "chars" else 0 for completion in completions]

    assert answer(reward, spec(conversational=True), EACH, {}).columns == {"score": [3.0, 2.0]}
    assert answer(reward, spec(conversational=True, unit="tokens"), EACH, {}).columns == {"score": [0.0, 0.0]}


def test_a_missing_column_is_refused_with_those_there_are():
    reply = answer(lambda completions, answers: [], spec(), EACH, {"ground_truth": "yes"})
    assert isinstance(reply, Refused) and "needs a column 'answers'" in reply.message
    assert reply.message.endswith("completions, prompts, finish_reason, completion_ids, ground_truth")


def test_what_a_function_raises():
    reply = answer(lambda completions: 1 / 0, spec(), EACH, {})
    assert isinstance(reply, Raised) and reply.message == "ZeroDivisionError: division by zero"
    assert "test_worker.py" in reply.traceback


def test_numbers_of_all_kinds():
    assert checked(np.float32([0.5, 2]), 2) == Scored({"score": [0.5, 2.0]}, {})
    assert checked((value for value in [1, np.int64(2)]), 2) == Scored({"score": [1.0, 2.0]}, {})


def test_wrong_values_are_told():
    assert "returned 1 values for 2 completions" in checked([1.0], 2).message
    assert "returned 0 values for 2 completions" in checked([], 2).message
    assert "returned None; it must return a list" in checked(None, 2).message
    assert "same keys, 'score' among them" in checked([{"acc": 1.0}], 1).message
    assert "returned a dict with the keys ['score']" in checked([{"score": 1.0, "acc": 1.0}, {"score": 1.0}], 2).message
    assert "returned a dict with the keys ['score']" in checked([{"score": 1.0, "acc": 1.0}, 0.5], 2).message
    mixed = checked([{"score": 1.0, "acc": 2.0}, {"score": 0.0, "acc": float("inf")}], 2)
    assert mixed == Scored({"score": [1.0, 0.0], "acc": [2.0, 0.0]}, {1: "acc=inf, which is not a finite number"})
    assert checked([10**400], 1).invalid[0].startswith("score=1000")
    assert checked(["x" * 500], 1).invalid[0].startswith("score='" + "x" * 119 + "...,")


def test_kwargs_that_no_argument_takes():
    assert load(Function("exact_match", {}, False))(completions=["a"], ground_truth=["a"]) == [1.0]
    assert load(Function("exact_match", {"any": 1}, False))  # it takes **columns
    with pytest.raises(ValueError, match="is unknown; known: arithmetic"):
        load(Function("exactmatch", {}, False))


@pytest.mark.parametrize(
    ("name", "own"),
    [("gsm8k", "answer"), ("math_answer", "solution"), ("problem_reward", "answers"), ("correctness_reward", "answer")],
)
def test_the_rules_take_their_own_column_or_the_ground_truth(name, own):
    """Of a run there always is a ground truth, though the dataset may have none: None then."""
    rule = Function(name, {}, False)
    each = EACH | {"completions": ["<answer>\\boxed{#### 5}</answer>\n#### 5", "#### 6"]}
    found = [
        answer(load(rule), rule, each, shared | {"data_source": ""})
        for shared in ({own: "5", "ground_truth": None}, {own: None, "ground_truth": "5"}, {"ground_truth": "5"})
    ]
    assert isinstance(found[0], Scored) and found[0] == found[1] == found[2]
