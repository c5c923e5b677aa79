"""The meter itself."""

import torch

from tests.memory import AllocationMeter


def test_counts_the_peak_and_what_is_left():
    meter = AllocationMeter()
    with meter:
        kept = torch.ones(1000)
        del_me = torch.ones(5000)
        del del_me
        torch.ones(2000)
    assert 24_000 <= meter.peak < 26_000
    assert 4_000 <= meter.held < 5_000
    with meter:
        del kept
    assert -500 < meter.held < 500
