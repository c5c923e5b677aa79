"""The kernels of logprob_kl.cpp, behind logprob_kl.py's functions; in liblogprob_kl_cpu_*.so, which setup.py builds."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megarl.csrc import libraries
from megarl.csrc.libraries import ADDRESS, DOUBLE, INT, LONG
from megarl.csrc.logprob_cpu import DTYPES

SOURCE = Path(__file__).with_name("logprob_kl.cpp")

_CHUNK_ELEMENTS = 1 << 20  # of logits that are copied to fp32: 4 MiB

_SCALES = [DOUBLE, DOUBLE, INT]  # temperature, soft-cap, threads
_SIGNATURES = {
    "megarl_logprob_kl_statistics_cpu": [*[ADDRESS, LONG] * 2, INT, INT, ADDRESS, ADDRESS, *[LONG] * 3, *_SCALES],
    "megarl_logprob_kl_backward_cpu": [*[ADDRESS, LONG] * 3, INT, INT, *[ADDRESS] * 3, *[LONG] * 4, *_SCALES],
}


@cache
def library() -> ctypes.CDLL | None:
    """As logprob_cpu.library."""
    return libraries.load_cpu(SOURCE, _SIGNATURES)


def local_statistics(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> torch.Tensor:
    """As ops.logprob_kl.reference_local_statistics, for bf16 and fp32 logits on a CPU; logits of two types are copied
    to fp32, a chunk of tokens at a time."""
    if logits.dtype != ref_logits.dtype:
        given, options = (logits, ref_logits, targets), (temperature, soft_cap, first, num_valid)
        chunks = [[of_all[rows] for of_all in given] for rows in _chunks(logits)]
        return torch.cat([local_statistics(x.float(), w.float(), y, *options) for x, w, y in chunks], dim=1)
    logits, ref_logits, columns = _alike(logits, ref_logits)
    targets = targets.contiguous()
    statistics = torch.empty((7, len(targets)), dtype=torch.float32)
    _call(
        "megarl_logprob_kl_statistics_cpu", logits.data_ptr(), logits.stride(columns), ref_logits.data_ptr(),
        ref_logits.stride(columns), DTYPES[logits.dtype], columns, targets.data_ptr(), statistics.data_ptr(),
        len(targets), num_valid, first, temperature, soft_cap or 0.0,
    )  # fmt: skip
    return statistics


def backward_into(
    out: torch.Tensor,
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    targets: torch.Tensor,
    merged: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> None:
    """As ops.logprob_kl.reference_backward_into. out and logits may be the same tensor."""
    options = (temperature, soft_cap, first, num_valid)
    if logits.dtype != ref_logits.dtype:
        for rows in _chunks(logits):
            wide = logits[rows].to(torch.float32, copy=True)
            of_rows = (targets[rows], merged[:, rows], upstream[:, rows])
            backward_into(wide, wide, ref_logits[rows].float(), *of_rows, *options)
            out[rows] = wide
        return
    in_rows = out.stride() != logits.stride()
    logits, ref_logits, columns = _alike(logits, ref_logits, in_rows)
    if not libraries.can_be_written(out, columns):
        gradient = torch.empty_like(out, memory_format=torch.contiguous_format)
        backward_into(gradient, logits, ref_logits, targets, merged, upstream, *options)
        out.copy_(gradient)
        return
    rows = [targets.contiguous(), merged.contiguous(), upstream.float().contiguous()]
    num_tokens, width = logits.shape
    _call(
        "megarl_logprob_kl_backward_cpu", out.data_ptr(), out.stride(columns), logits.data_ptr(),
        logits.stride(columns), ref_logits.data_ptr(), ref_logits.stride(columns), DTYPES[logits.dtype], columns,
        *(row.data_ptr() for row in rows), num_tokens, width, num_valid, first, temperature, soft_cap or 0.0,
    )  # fmt: skip


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))
    return [slice(start, start + rows) for start in range(0, max(len(logits), 1), rows)]


def _alike(
    logits: torch.Tensor, ref_logits: torch.Tensor, in_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both logits in one layout, and 1 where that is columns in one piece."""
    if not in_rows and all(map(libraries.columns_in_one_piece, (logits, ref_logits))):
        return logits, ref_logits, 1
    return libraries.rows(logits), libraries.rows(ref_logits), 0


def _call(name: str, *arguments) -> None:
    libraries.call_cpu(library(), name, *arguments)
