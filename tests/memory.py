"""How much memory a piece of code holds at most, beyond what there was: every CPU allocation that torch makes."""

import torch


class AllocationMeter:
    """Counts between `start` and `stop`, any number of times; what is freed counts wherever it was allocated."""

    def __init__(self):
        self.held = 0  # bytes, more than at the first start
        self.peak = 0
        self._profile = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            self.held += event.nbytes()
            self.peak = max(self.peak, self.held)
        self._profile = None

    def __enter__(self) -> "AllocationMeter":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
