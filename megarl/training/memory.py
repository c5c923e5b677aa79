"""What the models of a run hold on this rank: weights, gradients, optimizer state, and activations at their peak.

Measured on the tensors themselves, so that the CPU tells the same as a GPU: process memory there is mostly imports.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megarl.training.megatron_model import MegatronModel

MIB = 1 << 20


class _Saved:
    """A tensor that autograd keeps for the backward pass; counted while it is kept."""

    def __init__(self, tensor: torch.Tensor, meter: "_Activations"):
        self.tensor, self._meter, self._key = tensor, meter, tensor.untyped_storage().data_ptr()
        meter.keep(self._key, tensor.untyped_storage().nbytes())

    def __del__(self):
        self._meter.release(self._key)


class _Activations:
    """Bytes of the storages that autograd keeps at once; one that is kept twice counts once."""

    def __init__(self, others: set[int]):
        """others: storages that are no activations, by address."""
        self._others, self._holders, self._sizes = others, Counter(), {}
        self._now = self.peak = 0

    def keep(self, key: int, nbytes: int) -> None:
        self._holders[key] += 1
        if self._holders[key] == 1 and key not in self._others:
            self._sizes[key] = nbytes
            self._now += nbytes
            self.peak = max(self.peak, self._now)

    def release(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self._now -= self._sizes.pop(key, 0)


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Storage -> bytes: views of one storage count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@contextmanager
def measured(models: list[MegatronModel], parts: dict[str, float], when: bool = True) -> Iterator[None]:
    """Around an update: fills `parts` with weights, gradients, optimizer and activations in MiB of this rank.

    Does nothing where not `when`, since it slows the update down.
    """
    if not when:
        yield
        return
    meter = _Activations({key for model in models for key in _sizes(model.unwrapped.parameters())})
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, meter), lambda saved: saved.tensor):
        yield
    seen: set[int] = set()
    for part in ("weights", "gradients", "optimizer"):  # a master weight may be the weight itself: counted once
        sizes = _sizes(t for model in models for name, t in model.state_tensors() if name == part)
        parts[part] = sum(size for key, size in sizes.items() if key not in seen) / MIB
        seen |= sizes.keys()
    parts["activations"] = meter.peak / MIB
