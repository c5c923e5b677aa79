"""Libraries that setup.py builds of csrc/*.cu and csrc/*.cpp: plain C functions on addresses, called through ctypes."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from megarl.csrc import compile

ADDRESS, INT, LONG, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

Signatures = dict[str, list[type]]

log = logging.getLogger(__name__)


def bind(path: Path, signatures: Signatures) -> ctypes.CDLL:
    """The library at `path`, its functions typed as its source declares them."""
    library = ctypes.CDLL(str(path))
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library


def load_cuda(path: Path, signatures: Signatures) -> ctypes.CDLL | None:
    """The built library; None where there is none, the GPU is older than sm_80, or, with a warning, it is of other
    sources or another CUDA."""
    if not path.exists() or torch.cuda.get_device_capability() < (8, 0):
        return None
    try:
        return bind(path, signatures)
    except (OSError, AttributeError) as error:  # Triton computes the same
        return _not_used(path, error)


def load_cpu(source: Path, signatures: Signatures) -> ctypes.CDLL | None:
    """The library that was built of `source` for this processor; None where there is none or, with a warning, it was
    built of another source."""
    level = torch.backends.cpu.get_cpu_capability()
    path = compile.cpu_library(source, level)
    if not path.exists():
        return None
    try:
        library = bind(path, signatures)
        library.megarl_digest.restype = ctypes.c_char_p
        if library.megarl_digest().decode() == compile.digest(source):
            return library
        return _not_used(path, f"{source.name} or a header of it has changed since")
    except (OSError, AttributeError) as error:  # torch computes the same
        return _not_used(path, error)


def launch(library: ctypes.CDLL, name: str, device: torch.device, *arguments) -> None:
    """Call a function on the device's current stream. Raises RuntimeError with CUDA's error code."""
    with torch.cuda.device(device):
        code = getattr(library, name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if code:
        raise RuntimeError(
            f"{name} was not launched: CUDA error {code}. Build it for this GPU (TORCH_CUDA_ARCH_LIST names it, "
            f"`pip install --no-build-isolation .`), or remove {library._name} to use Triton"
        )


def call_cpu(library: ctypes.CDLL, name: str, *arguments) -> None:
    """Call a function on as many threads as torch uses."""
    code = getattr(library, name)(*arguments, torch.get_num_threads())
    if code == 2:
        raise MemoryError(f"{name}: no memory for a few numbers per token")
    assert code == 0, f"{name}: {code}"


def columns_in_one_piece(logits: torch.Tensor) -> bool:
    """Is it the layout that ops/linear_logprob.py gives its chunks on a CPU?"""
    return logits.stride(1) != 1 and logits.stride(0) == 1


def can_be_written(out: torch.Tensor, columns: int) -> bool:
    """Are a gradient's rows, or columns, in one piece each, and none over another? Anything else is torch's to copy."""
    length = out.shape[0 if columns else 1]
    return out.stride(0 if columns else 1) == 1 and (out.shape[columns] <= 1 or out.stride(columns) >= length)


def rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits [N, V_local] whose rows can be read by address."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def check_gradient(out: torch.Tensor) -> None:
    """ValueError where a gradient's rows cannot be written by address."""
    if out.stride(1) != 1:
        raise ValueError(
            f"the gradient's strides {out.stride()} must end in 1: call .contiguous() on the logits before the op"
        )


def _not_used(path: Path, reason: object) -> None:
    log.warning("%s cannot be used (%s): build it again, `pip install --no-build-isolation -e .`", path, reason)
