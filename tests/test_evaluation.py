"""pass@k, maj@k and intervals against their definitions; the commands against a real engine are in test_cli.py."""

from itertools import combinations

import numpy as np
import pytest

from megarl.evaluation import bootstrap, majority_at_k, pass_at_k, powers_of_two, report
from megarl.types import Completion, Prompt, Rollout

CORRECT = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]], float)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    by_definition = [np.mean([max(row[list(some)]) for some in combinations(range(4), k)]) for row in CORRECT]
    np.testing.assert_allclose(pass_at_k(CORRECT, k), by_definition, atol=1e-12)


def test_the_most_frequent_answer_wins_and_the_first_among_equals():
    answers = [["7", "7", "8", "9"], ["8", "7", "7", "8"], ["9", "8", "7", "7"]]
    correct = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], float)
    assert majority_at_k(answers, correct, 4).tolist() == [1.0, 0.0, 1.0]
    one = majority_at_k(answers, correct, 1)
    assert np.abs(one - 0.5).max() < 0.25  # a vote of one is a random completion
    assert majority_at_k(answers, correct, 2, seed=3).tolist() == majority_at_k(answers, correct, 2, seed=3).tolist()


def test_the_interval_holds_the_mean_and_narrows():
    few, many = (np.random.default_rng(1).integers(2, size=n).astype(float) for n in (40, 4000))
    mean, low, high = bootstrap(few)
    assert low < mean < high and mean == few.mean()
    # 1.96 standard errors on each side, within what a thousand resamples allow
    assert (high - low) / 2 == pytest.approx(1.96 * few.std() / np.sqrt(40), rel=0.2)
    assert bootstrap(many)[2] - bootstrap(many)[1] < (high - low) / 5
    assert bootstrap(np.ones(5)) == (1.0, 1.0, 1.0)


def test_powers_of_two_and_n():
    assert [powers_of_two(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def _rollout(texts: list[str], truth: str) -> Rollout:
    one = np.ones(1, np.int32)
    completions = [Completion(one, one.astype(np.float32), "stop", one.astype(np.uint8), one) for _ in texts]
    acc = np.array([float(text.endswith(truth)) for text in texts])
    return Rollout(Prompt(0, one, "", truth), completions, acc * 0.9, {"rule/acc": acc}, texts)


def test_a_report_names_everything():
    sampled = [_rollout(["so 5", "thus 5", "4", "5"], "5"), _rollout(["1", "2", "2", "3"], "3")]
    found = report({"sampled": sampled, "greedy": [_rollout(["5"], "5"), _rollout(["1"], "3")]}, r"(\d+)")
    assert list(found) == [
        "sampled accuracy",
        "greedy accuracy",
        *(f"{kind}@{k}" for k in (1, 2, 4) for kind in ("pass", "maj")),
    ]
    assert found["greedy accuracy"][0] == 0.5 and found["sampled accuracy"][0] == 0.5
    assert found["maj@4"][0] == 0.5 and found["pass@4"][0] == 1.0
