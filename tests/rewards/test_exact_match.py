import pytest

from megarl.rewards.exact_match import exact_match


def test_stripped_text_against_ground_truth():
    assert exact_match(completions=[" a\n", "b", "4"], ground_truth=["a", "a", 4], level=[1, 2, 3]) == [1.0, 0.0, 1.0]


def test_a_missing_ground_truth_is_refused():
    with pytest.raises(ValueError, match="needs a ground truth"):
        exact_match(completions=["a"], ground_truth=[None])
