"""Libraries that setup.py builds of csrc/*.cu: plain C functions on addresses, called through ctypes."""

import ctypes
import logging
from pathlib import Path

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ADDRESS, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
SCALES = [ctypes.c_double, ctypes.c_double, ADDRESS]  # temperature, soft-cap, stream

log = logging.getLogger(__name__)

Signatures = dict[str, list[type]]


def bind(path: Path, signatures: Signatures) -> ctypes.CDLL:
    """The library at `path`, its functions typed as its source declares them."""
    library = ctypes.CDLL(str(path))
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library


def load(path: Path, signatures: Signatures) -> ctypes.CDLL | None:
    """The built library; None where there is none, the GPU is older than sm_80, or, with a warning, it is of other
    sources or another CUDA."""
    if not path.exists() or torch.cuda.get_device_capability() < (8, 0):
        return None
    try:
        return bind(path, signatures)
    except (OSError, AttributeError) as error:  # Triton computes the same
        log.warning("%s cannot be used (%s): build it again, `pip install --no-build-isolation -e .`", path, error)
        return None


def launch(library: ctypes.CDLL, name: str, device: torch.device, *arguments) -> None:
    """Call a function on the device's current stream. Raises RuntimeError with CUDA's error code."""
    with torch.cuda.device(device):
        code = getattr(library, name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if code:
        raise RuntimeError(
            f"{name} was not launched: CUDA error {code}. Build it for this GPU (TORCH_CUDA_ARCH_LIST names it, "
            f"`pip install --no-build-isolation .`), or remove {library._name} to use Triton"
        )


def rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits [N, V_local] whose rows can be read by address."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def check_gradient(out: torch.Tensor) -> None:
    """ValueError where a gradient's rows cannot be written by address."""
    if out.stride(1) != 1:
        raise ValueError(
            f"the gradient's strides {out.stride()} must end in 1: call .contiguous() on the logits before the op"
        )
