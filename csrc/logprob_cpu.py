"""The kernels of logprob.cpp, behind the functions of logprob.py; in liblogprob_cpu_*.so, which setup.py builds."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megarl.csrc import libraries
from megarl.csrc.libraries import ADDRESS, DOUBLE, INT, LONG

SOURCE = Path(__file__).with_name("logprob.cpp")
DTYPES = {dtype: libraries.DTYPES[dtype] for dtype in (torch.float32, torch.bfloat16)}

_SCALES = [DOUBLE, DOUBLE, INT]  # temperature, soft-cap, threads
_SIGNATURES = {
    "megarl_logprob_statistics_cpu": [ADDRESS, LONG, INT, INT, ADDRESS, ADDRESS, LONG, LONG, LONG, *_SCALES],
    "megarl_logprob_backward_cpu": [ADDRESS, LONG, ADDRESS, LONG, INT, INT, *[ADDRESS] * 6, *[LONG] * 4, *_SCALES],
}


@cache
def library() -> ctypes.CDLL | None:
    """The built library, or None; see libraries.load_cpu."""
    return libraries.load_cpu(SOURCE, _SIGNATURES)


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, soft_cap: float | None, first: int, num_valid: int
) -> torch.Tensor:
    """As ops.logprob.reference_local_statistics, for bf16 and fp32 logits on a CPU; their rows or columns are best in
    one piece."""
    columns = int(libraries.columns_in_one_piece(logits))
    logits = logits if columns else libraries.rows(logits)
    targets = targets.contiguous()
    statistics = torch.empty((4, len(targets)), dtype=torch.float32)
    _call(
        "megarl_logprob_statistics_cpu", logits.data_ptr(), logits.stride(columns), DTYPES[logits.dtype], columns,
        targets.data_ptr(), statistics.data_ptr(), len(targets), num_valid, first, temperature, soft_cap or 0.0,
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
    """As ops.logprob.reference_backward_into. out and logits may be the same tensor."""
    columns = int(libraries.columns_in_one_piece(logits) and out.stride() == logits.stride())
    logits = logits if columns else libraries.rows(logits)
    num_tokens, width = logits.shape
    rows = [targets, maximum, log_sum, entropy, grad_logprob, grad_entropy]
    if not libraries.can_be_written(out, columns):
        gradient = torch.empty_like(out, memory_format=torch.contiguous_format)
        backward_into(gradient, logits, *rows, temperature, soft_cap, first, num_valid)
        out.copy_(gradient)
        return
    rows = [None if row is None else row.contiguous() for row in rows]
    _call(
        "megarl_logprob_backward_cpu", out.data_ptr(), out.stride(columns), logits.data_ptr(), logits.stride(columns),
        DTYPES[logits.dtype], columns, *(None if row is None else row.data_ptr() for row in rows), num_tokens, width,
        num_valid, first, temperature, soft_cap or 0.0,
    )  # fmt: skip


def _call(name: str, *arguments) -> None:
    libraries.call_cpu(library(), name, *arguments)
