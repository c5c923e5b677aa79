import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.balancing import partition

lengths_and_parts = st.tuples(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))


def sums(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


@settings(max_examples=200, deadline=None)
@given(lengths_and_parts)
def test_every_index_once_balanced_and_no_part_empty(case):
    lengths, count = case
    parts = partition(lengths, count)
    assert len(parts) == count
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert max(sums(parts, lengths)) - min(sums(parts, lengths)) <= max(lengths, default=0)
    assert sum(map(bool, parts)) == min(count, len(lengths))
    assert parts == partition(lengths, count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_largest_part_is_within_a_third_of_the_best(lengths, count):
    best = min(
        max(sum(length for length, p in zip(lengths, choice, strict=True) if p == part) for part in range(count))
        for choice in itertools.product(range(count), repeat=len(lengths))
    )
    assert max(sums(partition(lengths, count), lengths)) <= best * 4 / 3


def test_example_of_the_docstring():
    assert partition([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
