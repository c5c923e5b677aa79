"""Packed batches from response-aligned [B, T] arrays, and ranks that are threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from megarl.types import Batch

PER_SEQUENCE = ("index", "group_ids", "scores", "baseline_scores")
GOLDENS = Path(__file__).parents[1] / "goldens"


def golden(stem: str):
    """The arrays of a file of tests/goldens, by name."""
    return np.load(GOLDENS / f"{stem}.npz")


def pack(
    mask: np.ndarray, groups=None, scores=None, dtype: torch.dtype = torch.float64, **per_token: np.ndarray
) -> tuple[Batch, torch.Tensor]:
    """(batch, place [N]): row b of mask [B, T] becomes 1 + b % 3 prompt tokens and the response up to its last 1.

    batch.<name>[i] is per_token[<name>].flatten()[place[i]]; place is -1 on prompt tokens, where the fields are 0.
    dtype: of loss_mask, and so of what estimators return; float32 in a run.
    """
    num_rows, width = mask.shape
    places = []
    for row in range(num_rows):
        length = int(mask[row].nonzero()[0].max()) + 1 if mask[row].any() else 0
        places.append(np.concatenate([np.full(1 + row % 3, -1), row * width + np.arange(length)]))
    place = torch.from_numpy(np.concatenate(places))
    lengths = torch.tensor([len(p) for p in places])
    groups = torch.arange(num_rows) if groups is None else torch.as_tensor(groups)

    def packed(values):
        values = torch.as_tensor(values).flatten()
        return torch.where(place >= 0, values[place.clamp(min=0)], 0)

    batch = Batch(
        tokens=torch.arange(len(place)),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        loss_mask=packed(mask).to(dtype),
        weight_version=torch.zeros(len(place), dtype=torch.int32),
        index=torch.arange(num_rows),
        group_ids=groups,
        num_groups=int(groups.max()) + 1,
        num_sequences=num_rows,
        scores=None if scores is None else torch.as_tensor(scores),
        **{name: packed(values) for name, values in per_token.items()},
    )
    return batch, place


def responses(values: torch.Tensor, place: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Packed values [N] back as [B, T]; 0 where nothing was packed."""
    out = np.zeros(shape)
    at = place >= 0
    out.ravel()[place[at]] = values.detach()[at]
    return out


def run_loss(
    algorithm, batch: Batch, logprobs: torch.Tensor, config, entropy=None, full_kl=None
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(weighted loss, gradient [N], mean metrics) of a batch that is a whole mini-batch."""
    logprobs = logprobs.detach().clone().requires_grad_()
    weights = algorithm.weights(batch, config)
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    loss, metrics = algorithm.token_loss(
        logprobs, entropy, batch.with_(token_weights=weights), config, *([] if full_kl is None else [full_kl])
    )
    assert not loss[batch.loss_mask == 0].any() and not any(m[batch.loss_mask == 0].any() for m in metrics.values())
    total = (weights * loss).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    tokens = batch.loss_mask.sum()
    return total.item(), gradient, {name: (m.sum() / tokens).item() for name, m in metrics.items()}


def take(batch: Batch, rows: list[int]) -> tuple[Batch, torch.Tensor]:
    """(the batch of a rank that holds these sequences, which of the batch's tokens those are [n])."""
    starts = batch.cu_seqlens.tolist()
    tokens = torch.tensor([i for row in rows for i in range(starts[row], starts[row + 1])], dtype=torch.int64)
    rows = torch.tensor(rows, dtype=torch.int64)
    changed = {"cu_seqlens": torch.cat([torch.zeros(1), batch.lengths[rows].cumsum(0)]).int()}
    for name in (f.name for f in fields(Batch)):
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor) and name not in changed:
            changed[name] = value[rows if name in PER_SEQUENCE else tokens]
    return batch.with_(**changed), tokens


def on_ranks(function: Callable, batches: list[Batch]) -> list:
    """[function(batch, sum_over_ranks) for each batch], as ranks that meet in sum_over_ranks."""
    barrier = threading.Barrier(len(batches), timeout=30)
    posted: list[torch.Tensor | None] = [None] * len(batches)

    def run(rank):
        def sum_over_ranks(tensor):
            posted[rank] = tensor
            barrier.wait()
            total = torch.stack(posted).sum(0)
            barrier.wait()
            return total

        return function(batches[rank], sum_over_ranks)

    with ThreadPoolExecutor(len(batches)) as pool:
        return list(pool.map(run, range(len(batches))))
