"""vLLM's own model classes in a test's rank, without an engine: built for any coordinates, loaded by vLLM's loaders."""

import contextlib
import os
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from megarl.resharding.pieces import TensorMeta


def metas(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]


def checkpoint_tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(folder, "model.safetensors"))


@contextlib.contextmanager
def vllm_model(folder: str, tp: int = 1, pp: int = 1, ep: bool = False) -> Iterator[tuple[torch.nn.Module, object]]:
    """(this rank's model with raw, uninitialised parameters on the CPU, vLLM's config); the world is tp * pp ranks."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_DIST_IDENT="megarl-test",
        VLLM_PLUGINS="",
    )
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=ep,
        distributed_executor_backend="mp" if tp * pp > 1 else None,
    ).create_engine_config()
    rank = torch.distributed.get_rank()
    config.parallel_config.rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(tp * pp, rank, "env://", rank, backend="gloo")
        ensure_model_parallel_initialized(tp, pp)
        with torch.device("cpu"):
            model = initialize_model(config)
            record_metadata_for_reloading(model)
        yield model, config
        destroy_model_parallel()
