from megarl.rewards.reward_len import reward_len


def test_distance_from_twenty():
    assert reward_len(["", "a" * 20, "a" * 25]) == [-20.0, 0.0, -5.0]
    assert reward_len(["a" * 20], completion_ids=[[5, 1]], unit="tokens") == [-18.0]
