"""Megatron's distributed Adam and its learning-rate schedule, from the `optim` section."""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.model import OptimConfig
from megarl.parallel.layout import Layout


def build(
    model: DistributedDataParallel, config: OptimConfig, dtype: torch.dtype, layout: Layout, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of a wrapped model, its state cut over the data-parallel ranks, and its schedule.

    Args:
        model: the DDP-wrapped model (with `use_distributed_optimizer`).
        config: learning rate, betas, decay, clipping, schedule.
        dtype: the parameters' type; masters and moments are always fp32.
        layout: process groups.
        total_steps: optimizer steps of the whole run, the horizon of the decay.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        [model],
        use_gloo_process_groups=False,
        pg_collection=layout.groups,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.lr_warmup_steps,
        # The schedule is stepped before each update, so the last of the run is number total_steps: it still moves.
        lr_decay_steps=max(total_steps, config.lr_warmup_steps) + 1,
        lr_decay_style=config.lr_scheduler_type,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
