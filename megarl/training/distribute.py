"""Which sequence goes to which data-parallel rank and into which mini-batch: decided alike on every rank, then sent.

`together` consecutive sequences of the global batch stay in one rank and one mini-batch: 1, or a group's size.
"""

import torch
import torch.distributed as dist

from megarl.data import batch as batches
from megarl.data.balancing import partition
from megarl.parallel.collectives import broadcast_from_first
from megarl.parallel.layout import Layout
from megarl.types import Batch


def mini_batches(
    num_sequences: int, size: int, seed: int, step: int, epoch: int, together: int = 1
) -> list[torch.Tensor]:
    """The global sequence indices of each mini-batch of one pass: a fresh shuffle, the same in every layout."""
    assert num_sequences % together == 0 and size % together == 0, (num_sequences, size, together)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + epoch)
    firsts = together * torch.randperm(num_sequences // together, generator=generator)
    return list((firsts[:, None] + torch.arange(together)).flatten().split(size))


def shares(
    lengths: torch.Tensor, first_pass: list[torch.Tensor], dp_size: int, together: int = 1
) -> list[torch.Tensor]:
    """The global indices that each data-parallel rank owns for the whole step, ascending.

    Tokens are balanced within each mini-batch of the first pass; later passes shuffle what each rank already has.
    """
    owned: list[list[int]] = [[] for _ in range(dp_size)]
    for chunk in first_pass:
        units = chunk.view(-1, together)
        for owner, places in zip(owned, partition(lengths[units].sum(1).tolist(), dp_size), strict=True):
            owner += units[places].flatten().tolist()
    return [torch.tensor(sorted(owner), dtype=torch.int64) for owner in owned]


def _flatten(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    integers = [batch.tokens, batch.weight_version, batch.index, batch.group_ids]
    numbers = [batch.loss_mask, batch.rollout_logprobs, batch.scores]
    numbers += [] if batch.baseline_scores is None else [batch.baseline_scores]
    return torch.cat(integers), torch.cat(numbers)


def _unflatten(integers, numbers, lengths: torch.Tensor, num_groups: int, num_sequences: int) -> Batch:
    n, b = int(lengths.sum()), len(lengths)
    tokens, weight_version, index, group_ids = integers.split([n, n, b, b])
    loss_mask, rollout_logprobs, per_sequence = numbers.split([n, n, len(numbers) - 2 * n])
    scores, *baseline_scores = per_sequence.split(b)
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
        baseline_scores=baseline_scores[0] if baseline_scores else None,
        rollout_logprobs=rollout_logprobs,
    )


def distribute(
    batch: Batch | None, layout: Layout, mini_batch_size: int | None, seed: int, step: int, together: int = 1
) -> Batch:
    """This rank's share of the global batch that rank 0 holds (None elsewhere), packed, on the CPU. Collective.

    Two messages per rank, each holding that rank's share only; tensor-parallel peers get the same share.

    Args:
        batch: from `data.batch.from_rollouts`; at least `together` sequences for each data-parallel rank.
        layout: of the ranks.
        mini_batch_size: sequences of a mini-batch, within which tokens are balanced; None: all are one.
        seed, step: of the first pass's shuffle, see `mini_batches`.
        together: consecutive sequences that one rank gets.
    """
    header = None
    if batch is not None:
        header = torch.cat([torch.tensor([batch.num_groups, batch.baseline_scores is not None]), batch.lengths])
    header = broadcast_from_first(header, torch.int64)
    (num_groups, has_baselines), lengths = header[:2].tolist(), header[2:]
    first_pass = mini_batches(len(lengths), mini_batch_size or len(lengths), seed, step, 0, together)
    owned = shares(lengths, first_pass, layout.dp_size, together)
    if layout.is_first:
        for rank in range(1, layout.world_size):
            for flat in _flatten(batches.select(batch, owned[layout.sizes.of(rank).dp])):
                dist.send(flat, dst=rank)
        return batches.select(batch, owned[0])
    mine = lengths[owned[layout.dp_rank]]
    n, b = int(mine.sum()), len(mine)
    integers, numbers = torch.empty(2 * n + 2 * b, dtype=torch.int64), torch.empty(2 * n + (1 + has_baselines) * b)
    dist.recv(integers, src=0)
    dist.recv(numbers, src=0)
    return _unflatten(integers, numbers, mine, num_groups, len(lengths))
