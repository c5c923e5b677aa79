"""The kernels of logprob.cu, behind the functions of logprob.py; they are in liblogprob.so, which setup.py builds."""

import ctypes
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("liblogprob.so")

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ADDRESS, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_SCALES = [_DOUBLE, _DOUBLE, _ADDRESS]  # temperature, soft-cap, stream
_SIGNATURES = {
    "megarl_logprob_statistics": [_ADDRESS, _INT, _ADDRESS, _ADDRESS, _LONG, _LONG, _INT, _LONG, *_SCALES],
    "megarl_logprob_backward": [
        *(_ADDRESS, _ADDRESS, _INT), *[_ADDRESS] * 6, *[_LONG] * 3, _INT, _INT, _LONG, *_SCALES,
    ],
}  # fmt: skip


def bind(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions typed as logprob.cu declares them."""
    library = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library


@cache
def library() -> ctypes.CDLL | None:
    """The built library; None where there is none, or the GPU is older than what it is built for."""
    if not LIBRARY.exists() or torch.cuda.get_device_capability() < (8, 0):
        return None
    return bind(LIBRARY)


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, soft_cap: float | None, first: int, num_valid: int
) -> torch.Tensor:
    """As ops.logprob.reference_local_statistics, for bf16, fp16 and fp32 logits on a GPU."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_tokens = len(targets)
    statistics = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _launch(
            "megarl_logprob_statistics", logits.device, logits.data_ptr(), _DTYPES[logits.dtype], targets.data_ptr(),
            statistics.data_ptr(), num_tokens, logits.stride(0), num_valid, first, temperature, soft_cap or 0.0,
        )  # fmt: skip
    return statistics


def backward_into(
    out: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    log_sum: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> None:
    """As ops.logprob.reference_backward_into. out and logits may be the same tensor; out's rows must be contiguous."""
    num_tokens, width = logits.shape
    if out.stride(1) != 1:
        raise ValueError(
            f"the gradient's strides {out.stride()} must end in 1: call .contiguous() on the logits before the op"
        )
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows = (targets, maximum, log_sum, entropy, grad_logprob, grad_entropy)
    if num_tokens:
        _launch(
            "megarl_logprob_backward", logits.device, out.data_ptr(), logits.data_ptr(), _DTYPES[logits.dtype],
            *(None if row is None else row.data_ptr() for row in rows), num_tokens, out.stride(0), logits.stride(0),
            width, num_valid, first, temperature, soft_cap or 0.0,
        )  # fmt: skip


def _launch(name: str, device: torch.device, *arguments) -> None:
    with torch.cuda.device(device):
        code = getattr(library(), name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if code:
        raise RuntimeError(
            f"{name} was not launched: CUDA error {code}. Build it for this GPU (TORCH_CUDA_ARCH_LIST names it, "
            f"`pip install --no-build-isolation .`), or remove {LIBRARY} to use Triton"
        )
