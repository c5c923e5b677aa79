"""The `gathered` mode: whole checkpoint tensors pass through rank 0, a bucket at a time, and on to every engine."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarl.config.rollout import SyncConfig
from megarl.parallel.layout import Layout
from megarl.resharding import transport
from megarl.resharding.megatron_layout import ShardedModel
from megarl.resharding.pieces import Piece, TensorMeta, buckets, unpack


def _flat(pieces: list[Piece], model: ShardedModel) -> torch.Tensor:
    return torch.cat([p.view(model.tensors[p.tensor]).reshape(-1) for p in pieces])


def gather(model: ShardedModel, runs: list[list[TensorMeta]]) -> Iterator[tuple[list[TensorMeta], torch.Tensor | None]]:
    """Each bucket's whole tensors, one flat uint8 buffer at a time; rank 0 gets buffers, the others None.

    Collective over the ranks of the first data-parallel copy; ranks of other copies only iterate. Peak extra memory: one
    bucket on rank 0 and the largest rank's part of it; that part on the others.
    """
    rank = model.layout.rank
    for bucket in runs:
        names = {meta.name for meta in bucket}
        wanted = {source: [p for p in held if p.name in names] for source, held in model.sources.items()}
        if rank != 0:
            if wanted.get(rank):
                dist.send(_flat(wanted[rank], model), dst=0)
            yield bucket, None
            continue
        some = next(iter(model.tensors.values()))
        flat = torch.empty(sum(meta.nbytes for meta in bucket), dtype=torch.uint8, device=some.device)
        whole = unpack(bucket, flat)
        for source, held in wanted.items():
            if source == 0:
                for piece in held:
                    piece.of(whole[piece.name]).copy_(piece.view(model.tensors[piece.tensor]))
            elif held:
                received = torch.empty(sum(p.numel for p in held), dtype=some.dtype, device=some.device)
                dist.recv(received, src=source)
                for piece, part in zip(held, received.split([p.numel for p in held]), strict=True):
                    piece.of(whole[piece.name]).copy_(part.view(piece.sizes))
        yield bucket, flat


class GatheredBridge:
    """Carries the policy's weights into every engine. Collective: all trainer ranks call every method together."""

    def __init__(self, model: ShardedModel, layout: Layout, config: SyncConfig):
        self.model = model
        self.layout = layout
        self.port = config.port
        self.bucket_bytes = config.bucket_size_mib << 20
        self.buckets = buckets(model.metas, self.bucket_bytes)
        self.links: list[transport.Link] = []

    def connect(self, driver) -> None:
        """Meet every engine's workers, one communicator per engine, so that a dead one blocks no other.

        Args:
            driver: rank 0's RolloutDriver; None on other ranks.
        """
        if not self.layout.is_first:
            return
        tensors = [[meta.name, list(meta.shape), meta.dtype] for meta in self.model.metas]
        stores = [transport.host(self.port + i if self.port else 0) for i in range(driver.num_engines)]
        sizes = [1 + workers for workers in driver.engine_world_sizes]
        pending = driver.init_weight_transfer(
            [
                dict(
                    host=transport.LOOPBACK,
                    port=store.port,
                    world_size=size,
                    tensors=tensors,
                    bucket_bytes=self.bucket_bytes,
                )
                for store, size in zip(stores, sizes, strict=True)
            ]
        )
        self.links = [transport.join(store, 0, size) for store, size in zip(stores, sizes, strict=True)]
        pending.result()

    def sync(self, driver, version: int) -> None:
        """Install the policy's present weights in every engine as `version`; returns when all of them answer with it."""
        pending = driver.begin_sync(version) if self.layout.is_first and self.links else None
        for _, flat in gather(self.model, self.buckets):
            for link in self.links:
                link.send(flat.cpu())
        if pending is not None:
            pending.result()
