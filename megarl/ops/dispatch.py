"""Which code an op's inner steps run: the kernels of csrc/ that there are for the device, else the torch reference.

On a GPU CUDA C++ where setup.py has compiled it for that GPU, else Triton, else torch; on a CPU C++ where setup.py has
compiled it, else torch. It is said once, when first asked. fp64, and fp16 on a CPU, are always the reference's. The
self-test at the start of a run (self_test.py) may send everything to the reference.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import ModuleType

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Path:
    """One way to compute the ops."""

    name: str  # "CUDA C++", "Triton", "C++" or "torch"
    kernels: dict[str, ModuleType]  # by op, its file's stem; an op that is not here is computed by its reference
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    columns: bool = False  # is a column of logits in one piece what its kernels and matrix products work on fastest?


TORCH = Path("torch", {})

_refused = False


def path(device: torch.device, dtype: torch.dtype) -> Path:
    """The path of tensors of this type on this device."""
    found = TORCH if _refused else _found(device.type)
    return found if dtype in found.dtypes else TORCH


def use_reference(reason: str) -> None:
    """Compute every op by its torch reference from here on, in this process, and say why."""
    global _refused
    _refused = True
    log.warning("log-prob kernels are not used in this process, torch operations are: %s", reason)


def is_refused() -> bool:
    """Has use_reference been called?"""
    return _refused


def dispatched(op: str, reference: Callable) -> Callable:
    """`reference`, or the function of its name in the kernels of `op` where the first tensor's path has them.

    reference: named reference_<name>; its first argument is a tensor of the logits' type on their device.
    """
    name = reference.__name__.removeprefix("reference_")

    @wraps(reference)
    def chosen(tensor, *arguments):
        kernels = path(tensor.device, tensor.dtype).kernels.get(op)
        return (reference if kernels is None else getattr(kernels, name))(tensor, *arguments)

    return chosen


@cache
def _found(device_type: str) -> Path:
    """The best path that is installed."""
    if device_type == "cpu":
        from megarl.csrc import linear_logprob_cpu, logprob_cpu, logprob_kl_cpu

        kernels = {"logprob": logprob_cpu, "logprob_kl": logprob_kl_cpu, "linear_logprob": linear_logprob_cpu}
        if all(of_op.library() is not None for of_op in kernels.values()):
            log.info("log-prob kernels: C++ (csrc/*.cpp)")
            return Path("C++", kernels, tuple(logprob_cpu.DTYPES), columns=True)
        log.info(
            "log-prob kernels: torch operations; faster ones are for x86-64 with AVX2, and built where megarl is "
            "installed with a C++ compiler (`pip install -v` says what is amiss)"
        )
        return TORCH
    if device_type != "cuda":
        log.info("log-prob kernels: torch operations; there are no kernels for a %s", device_type)
        return TORCH
    from megarl.csrc import logprob_cuda, logprob_kl_cuda

    remedy = "install megarl with nvcc and without build isolation for csrc/*.cu"
    if logprob_cuda.library() is not None and logprob_kl_cuda.library() is not None:
        log.info("log-prob kernels: CUDA C++ (csrc/*.cu)")
        return Path("CUDA C++", {"logprob": logprob_cuda, "logprob_kl": logprob_kl_cuda})
    if importlib.util.find_spec("triton") is not None:
        from megarl.csrc import logprob, logprob_kl

        log.warning("log-prob kernels: Triton (csrc/*.py); %s", remedy)
        return Path("Triton", {"logprob": logprob, "logprob_kl": logprob_kl})
    log.warning("log-prob kernels: torch operations, slow; %s, or install Triton", remedy)
    return TORCH
