import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.order import Mixture, Order


def mixture(sizes, weights=None):
    files = [[(file, item) for item in range(size)] for file, size in enumerate(sizes)]
    return Mixture(files, weights or [1.0] * len(sizes))


def test_every_epoch_holds_every_item_once_and_in_a_fresh_order():
    order = Order(mixture([10]), seed=3)
    drawn = [item for _ in range(10) for item in order.take(3)]  # 30 draws, takes span the ends of epochs
    epochs = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == [(0, item) for item in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_order_depends_on_the_seed_only():
    first, again, other = (Order(mixture([50, 20]), seed).take(60) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_without_shuffle_rows_come_as_they_lie():
    assert Order(mixture([3]), seed=0, shuffle=False).take(7) == [(0, i) for i in (0, 1, 2, 0, 1, 2, 0)]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**31),
    count=st.integers(0, 60),
)
def test_weighted_shares_and_epochs(sizes, data, seed, count):
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    drawn = Order(mixture(sizes, weights), seed).take(count)
    per_file = Counter(file for file, _ in drawn)
    for file, size in enumerate(sizes):
        assert abs(per_file[file] - count * weights[file] / sum(weights)) <= len(sizes)
        items = Counter(item for f, item in drawn if f == file)
        assert max(items.values(), default=0) <= -(-per_file[file] // size)
        assert min((items[item] for item in range(size)), default=0) >= per_file[file] // size


def test_state_is_json_and_restores_exactly():
    order = Order(mixture([7, 4], [2.0, 1.0]), seed=5)
    order.take(13)
    state = json.loads(json.dumps(order.state()))
    expected = order.take(40)
    resumed = Order(mixture([7, 4], [2.0, 1.0]), seed=5)
    resumed.take(2)
    resumed.restore(state)
    assert resumed.take(40) == expected


def test_a_state_of_other_data_is_refused():
    state = Order(mixture([7]), seed=5).state()
    with pytest.raises(ValueError, match=r"sizes=\[7\], this run has sizes=\[8\]"):
        Order(mixture([8]), seed=5).restore(state)
    with pytest.raises(ValueError, match="seed=5, this run has seed=6"):
        Order(mixture([7]), seed=6).restore(state)
