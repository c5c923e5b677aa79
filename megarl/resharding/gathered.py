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

    Collective over the ranks of the first data-parallel copy; ranks of other copies only iterate. Peak extra memory:
    one bucket on rank 0 and the largest rank's part of it; that part on the others.
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

    def __init__(self, model: ShardedModel, layout: Layout, config: SyncConfig, driver):
        """Open, on rank 0, a meeting point for each engine: one communicator each, so that a dead one blocks no other.

        Args:
            driver: the rank's rollout driver; engines need not be ready yet.

        Raises:
            ValueError: `sync.port` is taken.
        """
        self.model = model
        self.layout = layout
        self.driver = driver
        self.bucket_bytes = config.bucket_size_mib << 20
        self.buckets = buckets(model.metas, self.bucket_bytes)
        self.stores = [transport.host(config.port + i if config.port else 0) for i in range(driver.num_engines)]
        self.links: list[transport.Link] = []

    def connect(self) -> None:
        """Meet the workers of every engine; all engines must be ready."""
        if not self.stores:
            return
        sizes = [1 + workers for workers in self.driver.engine_world_sizes]
        tensors = [[meta.name, list(meta.shape), meta.dtype] for meta in self.model.metas]
        common = dict(host=transport.LOOPBACK, tensors=tensors, bucket_bytes=self.bucket_bytes)
        pending = self.driver.init_weight_transfer(
            [common | dict(port=store.port, world_size=size) for store, size in zip(self.stores, sizes, strict=True)]
        )
        self.links = [transport.join(store, 0, size) for store, size in zip(self.stores, sizes, strict=True)]
        pending.result()

    def sync(self, version: int) -> None:
        """Install the policy's present weights in every engine as `version`; returns when all of them answer with it.

        Raises:
            MegarlError: an engine died or refused.
        """
        pending = self.driver.begin_sync(version) if self.links else None
        if pending is not None:
            pending.wait_until_started()
        for _, flat in gather(self.model, self.buckets):
            for link in self.links:
                try:
                    link.send(flat.cpu())
                except RuntimeError:  # gloo's word for a dead peer; the driver knows which engine died, and of what
                    pending.result()
                    raise
        if pending is not None:
            pending.result()
