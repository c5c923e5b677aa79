import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import _first_fit_decreasing, pack

cases = st.tuples(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 400), st.integers(1, 12))


@settings(max_examples=200, deadline=None)
@given(cases)
def test_every_index_once_under_the_budget_in_few_bins(case):
    lengths, budget, min_bins = case
    bins = pack(lengths, budget, min_bins)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in indices) <= budget for indices in bins)
    assert len(bins) == max(min_bins, len(pack(lengths, budget)))
    assert len(pack(lengths, budget)) <= max(1, len(_first_fit_decreasing(lengths, budget)))
    assert sum(map(bool, bins)) >= min(len(lengths), min_bins)
    assert bins == pack(lengths, budget, min_bins)


def test_bins_are_balanced_when_there_is_room():
    assert pack([6, 2, 2, 2], max_tokens=8) == [[0], [1, 2, 3]]  # first-fit alone gives [[0, 1], [2, 3]]
    lengths = [10] * 12 + [5] * 4
    assert [sum(lengths[i] for i in indices) for indices in pack(lengths, max_tokens=60)] == [50, 45, 45]


def test_a_tight_fit_is_found():
    # longest first to the lightest bin gives 3 + 2 + 2 = 7; first-fit decreasing gives 3 + 3 and 2 + 2 + 2
    assert len(pack([3, 3, 2, 2, 2], max_tokens=6)) == 2


def test_all_bins_of_an_empty_rank_are_empty():
    assert pack([], max_tokens=8, min_bins=3) == [[], [], []]


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, over the micro-batch budget of 8"):
        pack([3, 9], max_tokens=8)
