"""Runs inside vLLM's workers: receives new weights and installs them through vLLM's own loader.

Registered by the entry point `vllm.general_plugins`, which every vLLM process loads. Nothing of Megatron may come along
(a test looks at `sys.modules`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "megarl"}'` known. Called by vLLM in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from megarl.resharding import transport
    from megarl.resharding.pieces import TensorMeta, buckets, unpack

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        host: str
        port: int
        world_size: int
        tensors: list  # [[name, shape, dtype], ...] in the order they travel
        bucket_bytes: int

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        version: int

    class GatheredEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        """Whole tensors in buckets. One update: layers back to their raw form on meta, loader, post-processing."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            metas = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in init_info.tensors]
            self.buckets = buckets(metas, init_info.bucket_bytes)
            store = transport.visit(init_info.host, init_info.port)
            self.link = transport.join(store, 1 + self.parallel_config.rank, init_info.world_size)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info) -> None:
            # The base class synchronises an accelerator here, which a CPU worker does not have.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.model.load_weights(self._arriving())

        def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in self.buckets:
                flat = self.link.receive(sum(meta.nbytes for meta in bucket))
                yield from unpack(bucket, flat.to(self.device)).items()

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            # A tied lm_head loads nothing itself, so the reload leaves out its post-processing; on the CPU that is a
            # prepacked copy, which would go on answering with the old embedding.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            self.link = None

    WeightTransferEngineFactory.register_engine("megarl", GatheredEngine)
