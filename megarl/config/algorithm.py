"""`algorithm.*`: `name` picks a file of megarl/algorithms, and that file's Config holds the other keys."""

from megarl.config.base import Section, key


class AlgorithmConfig(Section):
    """What every algorithm's own Config extends."""

    name: str = key(..., "A file of megarl/algorithms by its name.")

    def check_group_size(self, n: int) -> None:
        """Raise ValueError where `n` (rollout.n) completions of a prompt do not suit the algorithm."""
