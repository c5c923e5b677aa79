"""Which sequence goes to which data-parallel rank and into which mini-batch: decided alike on every rank, then sent."""

import torch
import torch.distributed as dist

from megarl.data import batch as batches
from megarl.data.balancing import partition
from megarl.parallel.collectives import broadcast_from_first
from megarl.parallel.layout import Layout
from megarl.types import Batch, Rollout


def mini_batches(num_sequences: int, size: int, seed: int, step: int, epoch: int) -> list[torch.Tensor]:
    """The global sequence indices of each mini-batch of one pass: a fresh shuffle, the same in every layout."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + epoch)
    return list(torch.randperm(num_sequences, generator=generator).split(size))


def shares(lengths: torch.Tensor, first_pass: list[torch.Tensor], dp_size: int) -> list[torch.Tensor]:
    """The global indices that each data-parallel rank owns for the whole step, ascending.

    Tokens are balanced within each mini-batch of the first pass; later passes shuffle what each rank already has.
    """
    owned: list[list[int]] = [[] for _ in range(dp_size)]
    for chunk in first_pass:
        for owner, places in zip(owned, partition(lengths[chunk].tolist(), dp_size), strict=True):
            owner += chunk[places].tolist()
    return [torch.tensor(sorted(owner), dtype=torch.int64) for owner in owned]


def _flatten(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    integers = [batch.tokens, batch.weight_version, batch.index, batch.group_ids]
    numbers = [batch.loss_mask, batch.rollout_logprobs, batch.scores]
    return torch.cat(integers), torch.cat(numbers)


def _unflatten(integers, numbers, lengths: torch.Tensor, num_groups: int, num_sequences: int) -> Batch:
    n, b = int(lengths.sum()), len(lengths)
    tokens, weight_version, index, group_ids = integers.split([n, n, b, b])
    loss_mask, rollout_logprobs, scores = numbers.split([n, n, b])
    return Batch(
        tokens=tokens,
        position_ids=batches.positions(lengths),
        cu_seqlens=batches.cumulative(lengths),
        loss_mask=loss_mask,
        weight_version=weight_version,
        index=index,
        group_ids=group_ids,
        num_groups=num_groups,
        num_sequences=num_sequences,
        scores=scores,
        rollout_logprobs=rollout_logprobs,
    )


def distribute(rollouts: list[Rollout] | None, layout: Layout, mini_batch_size: int, seed: int, step: int) -> Batch:
    """This rank's share of the rollouts that rank 0 holds (None elsewhere), packed, on the CPU. Collective.

    Two messages per rank, each holding that rank's share only; tensor-parallel peers get the same share.
    """
    batch = batches.from_rollouts(rollouts) if layout.is_first else None
    header = broadcast_from_first(
        None if batch is None else torch.cat([torch.tensor([batch.num_groups]), batch.lengths]), torch.int64
    )
    num_groups, lengths = int(header[0]), header[1:]
    first_pass = mini_batches(len(lengths), mini_batch_size, seed, step, epoch=0)
    owned = shares(lengths, first_pass, layout.dp_size)
    if layout.is_first:
        for rank in range(1, layout.world_size):
            for flat in _flatten(batches.select(batch, owned[layout.sizes.of(rank).dp])):
                dist.send(flat, dst=rank)
        return batches.select(batch, owned[0])
    mine = lengths[owned[layout.dp_rank]]
    n, b = int(mine.sum()), len(mine)
    integers, numbers = torch.empty(2 * n + 2 * b, dtype=torch.int64), torch.empty(2 * n + b)
    dist.recv(integers, src=0)
    dist.recv(numbers, src=0)
    return _unflatten(integers, numbers, mine, num_groups, len(lengths))
