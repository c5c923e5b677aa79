"""Whole checkpoint tensors, put together on one rank at a time: for export, and for the `gathered` mode of a sync."""

from collections.abc import Iterator

import torch

from megarl.parallel import device
from megarl.resharding.megatron_layout import ShardedModel
from megarl.resharding.pieces import Holding, TensorMeta, unpack
from megarl.resharding.plan import Sources, make_plan, whole
from megarl.resharding.transport import exchange_among_ranks

_BUCKET_BYTES = 256 << 20


def gather(
    model: ShardedModel, runs: list[list[TensorMeta]], owners: list[int] | None = None
) -> Iterator[tuple[list[TensorMeta], torch.Tensor | None]]:
    """Each run's whole tensors in one flat uint8 buffer, at its owner (rank 0, unless `owners` says otherwise).

    Collective over all ranks; all but a run's owner get None. Peak extra memory: the run at its owner, and at every
    rank what it sends or receives of it at once, at most 256 MiB.
    """
    sources = Sources(model.holdings)
    for run, owner in zip(runs, owners or [0] * len(runs), strict=True):
        metas = {meta.name: meta for meta in run}
        pieces = [whole(meta.name, meta.shape) for meta in run]
        plan = make_plan(sources, [Holding((owner,), pieces)], metas, _BUCKET_BYTES)
        flat, tensors = None, {}
        if model.layout.rank == owner:
            flat = torch.empty(sum(meta.nbytes for meta in run), dtype=torch.uint8, device=device.current())
            tensors = unpack(run, flat)
        exchange_among_ranks(plan, model.layout.rank, model.tensors, tensors, metas, device.current())
        yield run, flat
