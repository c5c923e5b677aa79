"""Which rank does what: the process groups of one layout, built once and passed explicitly.

Megatron's global `parallel_state` is initialised here (a few of its internals still read it) and read nowhere else.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.parallel import ParallelConfig
from megarl.parallel import device
from megarl.parallel.coordinates import Coordinates, ParallelSizes

COLLECTIVE_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Layout:
    """This process's place and the groups that it shares with others."""

    rank: int
    sizes: ParallelSizes
    sequence_parallel: bool
    groups: ProcessGroupCollection

    @property
    def coordinates(self) -> Coordinates:
        return self.sizes.of(self.rank)

    @property
    def world_size(self) -> int:
        return self.sizes.world_size

    @property
    def tp_size(self) -> int:
        return self.sizes.tp

    @property
    def dp_size(self) -> int:
        return self.sizes.dp

    @property
    def tp_rank(self) -> int:
        return self.coordinates.tp

    @property
    def dp_rank(self) -> int:
        return self.coordinates.dp

    @property
    def is_first(self) -> bool:
        """Rank 0: talks to the rollout driver, writes files, speaks to the user."""
        return self.rank == 0


def launched_world_size() -> int:
    """The number of ranks that torchrun (or our launcher) says it started; 1 when there was no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world_size(needed: int, config: ParallelConfig) -> None:
    """Refuse a launcher that started another number of ranks than the configuration needs.

    Raises:
        ValueError: names both numbers and both remedies.
    """
    started = launched_world_size()
    if started != needed:
        raise ValueError(
            f"the launcher started {started} trainer processes, but the configuration needs {needed} "
            f"(parallel.tensor_model_parallel_size={config.tensor_model_parallel_size}); start {needed}, or set "
            f"trainer.nnodes and trainer.n_gpus_per_node to match"
        )


def initialize(config: ParallelConfig, seed: int) -> Layout:
    """Join the world and build the groups of the configuration. Collective; the environment is torchrun's.

    Raises:
        ValueError: the world cannot be cut into groups of `tensor_model_parallel_size`.
    """
    _connect()
    world_size, tp_size = dist.get_world_size(), config.tensor_model_parallel_size
    if world_size % tp_size:
        raise ValueError(f"{world_size} ranks cannot be cut into groups of tensor_model_parallel_size={tp_size}")
    return join(ParallelSizes(world_size, tp=tp_size), config.sequence_parallel, seed)


def _connect() -> None:
    device.claim(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(device.distributed_backend(), timeout=COLLECTIVE_TIMEOUT)


def join(sizes: ParallelSizes, sequence_parallel: bool, seed: int) -> Layout:
    """Join the world and build the groups of `sizes`; those of an earlier layout are gone. Collective."""
    _connect()
    assert sizes.world_size == dist.get_world_size(), f"{sizes} in a world of {dist.get_world_size()} ranks"
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    layout = Layout(
        rank=dist.get_rank(),
        sizes=sizes,
        sequence_parallel=sequence_parallel,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )
    at = layout.coordinates
    # Stages draw different numbers, as in Megatron's own start-up.
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * at.pp, tp_rank=at.tp, ep_rank=at.ep, etp_rank=at.etp)
    return layout


def shutdown() -> None:
    """Leave the world, so that a process can join another (tests) or end without a warning."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
