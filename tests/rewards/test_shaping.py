import numpy as np

from megarl.rewards.shaping import missing_eos, soft_overlong, truncated
from megarl.types import Completion


def completion(ids, reason="length"):
    length = len(ids)
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=-np.arange(length, dtype=np.float32),
        finish_reason=reason,
        loss_mask=np.ones(length, np.uint8),
        weight_version=np.full(length, 3, np.int32),
    )


def test_truncation_keeps_the_first_stop_token_and_ends_there():
    cut = truncated(completion([5, 0, 7, 0, 9]), {0})  # 0 is a token like any other
    assert cut.token_ids.tolist() == [5, 0] and cut.finish_reason == "stop"
    assert (
        cut.logprobs.tolist() == [0, -1] and cut.loss_mask.tolist() == [1, 1] and cut.weight_version.tolist() == [3, 3]
    )
    assert truncated(completion([7, 5]), {7, 5}).token_ids.tolist() == [7]
    assert truncated(completion([5, 7]), {7}).token_ids.tolist() == [5, 7]


def test_without_a_stop_token_nothing_changes():
    for ids in ([5, 7], []):
        whole = completion(ids)
        assert truncated(whole, {0}) is whole


def test_missing_eos():
    assert missing_eos(["stop", "length"], 1.5).tolist() == [0.0, -1.5]


def test_soft_overlong_is_equation_13_of_dapo():
    lengths = [0, 5, 6, 7, 9, 10, 12]  # L_max 10, L_cache 4
    expected = [0, 0, 0, -0.25, -0.75, -1, -1]
    assert soft_overlong(lengths, 10, 4, 1.0).tolist() == expected
    assert soft_overlong(lengths, 10, 4, 2.0).tolist() == [2 * one for one in expected]
    assert soft_overlong(lengths, 10, 0, 1.0).tolist() == [0] * 7
