"""The kernels of logprob.cu, behind the functions of logprob.py; they are in liblogprob.so, which setup.py builds."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megarl.csrc import libraries
from megarl.csrc.libraries import ADDRESS, DOUBLE, DTYPES, INT, LONG, check_gradient

LIBRARY = Path(__file__).with_name("liblogprob.so")

_SCALES = [DOUBLE, DOUBLE, ADDRESS]  # temperature, soft-cap, stream
_SIGNATURES = {
    "megarl_logprob_statistics": [ADDRESS, INT, ADDRESS, ADDRESS, LONG, LONG, INT, LONG, *_SCALES],
    "megarl_logprob_backward": [
        *(ADDRESS, ADDRESS, INT), *[ADDRESS] * 6, *[LONG] * 3, INT, INT, LONG, *_SCALES,
    ],
}  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The built library, or None; see libraries.load_cuda."""
    return libraries.load_cuda(LIBRARY, _SIGNATURES)


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, soft_cap: float | None, first: int, num_valid: int
) -> torch.Tensor:
    """As ops.logprob.reference_local_statistics, for bf16, fp16 and fp32 logits on a GPU."""
    logits = libraries.rows(logits)
    num_tokens = len(targets)
    statistics = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _launch(
            "megarl_logprob_statistics", logits.device, logits.data_ptr(), DTYPES[logits.dtype], targets.data_ptr(),
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
    check_gradient(out)
    logits = libraries.rows(logits)
    rows = (targets, maximum, log_sum, entropy, grad_logprob, grad_entropy)
    if num_tokens:
        _launch(
            "megarl_logprob_backward", logits.device, out.data_ptr(), logits.data_ptr(), DTYPES[logits.dtype],
            *(None if row is None else row.data_ptr() for row in rows), num_tokens, out.stride(0), logits.stride(0),
            width, num_valid, first, temperature, soft_cap or 0.0,
        )  # fmt: skip


def _launch(name: str, device: torch.device, *arguments) -> None:
    libraries.launch(library(), name, device, *arguments)
