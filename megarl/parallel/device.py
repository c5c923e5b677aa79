"""The only file that asks "is there CUDA?". Everything else asks for a device, a backend or a setting by name."""

import os
import time

import torch

HAS_CUDA = torch.cuda.is_available()


def current() -> torch.device:
    """The device of this process: one GPU per local rank, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")


def claim(local_rank: int) -> torch.device:
    """Bind this process to its GPU (no-op on a CPU, where the launcher has set OMP_NUM_THREADS)."""
    if HAS_CUDA:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
                "lower trainer.n_gpus_per_node or check CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return current()


def distributed_backend() -> str:
    """One world for both kinds of tensor: NCCL carries CUDA tensors, gloo CPU tensors."""
    return "cpu:gloo,cuda:nccl" if HAS_CUDA else "gloo"


def synchronize() -> None:
    """Wait for the device's queued work, so that a timer measures it."""
    if HAS_CUDA:
        torch.cuda.synchronize()


def now() -> float:
    """Seconds on a monotonic clock, after the device's queued work."""
    synchronize()
    return time.perf_counter()


def transformer_settings() -> dict:
    """TransformerConfig fields that name a kernel: fused ones on CUDA, plain torch ones on the CPU.

    The CPU has none of Megatron's fused kernels; the two that are `torch.compile` under another name (bias-dropout and
    bias-activation fusion) are off there because the facade of `mcore_cpu` cannot be traced.
    """
    fused = HAS_CUDA
    return dict(
        use_cpu_initialization=not fused,
        gradient_accumulation_fusion=False,  # needs APEX's extension; main_grad is filled by DDP's hooks instead
        apply_rope_fusion=False,  # positions come per token (models/build.py), the fused kernel wants per sequence
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
        masked_softmax_fusion=False,  # the core attention is ours
        bias_dropout_fusion=fused,
        bias_activation_fusion=False,
        cross_entropy_loss_fusion=False,  # computes in bf16 inside: off by 2e-4
    )


def visible_gpu_ids() -> list[str]:
    """The identifiers that CUDA_VISIBLE_DEVICES of a child process may name; empty on a CPU."""
    if not HAS_CUDA:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
