"""In which order rows are drawn from several files: weighted, endless, and the same from the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

Item = TypeVar("Item")


@dataclass(frozen=True)
class Mixture(Generic[Item]):
    """The items of several files, each file with its weight. Iterates over all items, file after file."""

    files: list[list[Item]]  # none empty
    weights: list[float]  # one per file, positive; normalised by `Order`
    report: list[str] = field(default_factory=list)  # what the reader dropped or cut, one line per file

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def __iter__(self) -> Iterator[Item]:
        for items in self.files:
            yield from items


class Order(Generic[Item]):
    """An endless, deterministic order over a `Mixture`.

    Every draw goes to the file that is furthest behind its weighted share, so the shares hold within one item at any
    time. Within a file, every item comes once per epoch, in a fresh order per epoch that depends on (seed, file, epoch)
    only; a `take` may span the end of an epoch, and nothing is dropped there.
    """

    def __init__(self, mixture: Mixture[Item], seed: int, shuffle: bool = True):
        assert len(mixture.files) == len(mixture.weights) and all(mixture.files)
        self._mixture = mixture
        self._seed = seed
        self._shuffle = shuffle
        self._shares = np.array(mixture.weights, np.float64) / sum(mixture.weights)
        self._taken = np.zeros(len(mixture.files), np.int64)
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}  # of each file: (epoch, [items])

    def take(self, count: int) -> list[Item]:
        """The next `count` items."""
        return [self._next() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Where the order stands, as plain JSON types; `restore` continues from there."""
        return {**self._identity(), "taken": self._taken.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises ValueError when the state belongs to other data, weights, another seed or another `shuffle`.
        """
        for name, here in self._identity().items():
            if state[name] != here:
                raise ValueError(
                    f"the saved data order has {name}={state[name]}, this run has {name}={here}; "
                    "resume with the same data files, weights, seed and data.shuffle"
                )
        self._taken = np.array(state["taken"], np.int64)

    def _identity(self) -> dict[str, Any]:
        sizes = [len(items) for items in self._mixture.files]
        return {"seed": self._seed, "shuffle": self._shuffle, "sizes": sizes, "weights": list(self._mixture.weights)}

    def _next(self) -> Item:
        file = int(np.argmax(self._shares * (self._taken.sum() + 1) - self._taken))
        items = self._mixture.files[file]
        epoch, position = divmod(int(self._taken[file]), len(items))
        self._taken[file] += 1
        return items[self._permutation(file, epoch)[position] if self._shuffle else position]

    def _permutation(self, file: int, epoch: int) -> np.ndarray:
        if self._permutations.get(file, (None,))[0] != epoch:
            rng = np.random.default_rng([self._seed, file, epoch])
            self._permutations[file] = (epoch, rng.permutation(len(self._mixture.files[file])))
        return self._permutations[file][1]
