"""The kernels of logprob_kl.cu, behind the functions of logprob_kl.py; in liblogprob_kl.so, which setup.py builds."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megarl.csrc import libraries
from megarl.csrc.libraries import ADDRESS, DOUBLE, DTYPES, INT, LONG, check_gradient

LIBRARY = Path(__file__).with_name("liblogprob_kl.so")

_SCALES = [DOUBLE, DOUBLE, ADDRESS]  # temperature, soft-cap, stream
_SIGNATURES = {
    "megarl_logprob_kl_statistics": [
        *(ADDRESS, ADDRESS, INT, ADDRESS, ADDRESS), *[LONG] * 3, INT, LONG, *_SCALES,
    ],
    "megarl_logprob_kl_backward": [
        *(ADDRESS, ADDRESS, ADDRESS, INT), *[ADDRESS] * 3, *[LONG] * 4, INT, INT, LONG, *_SCALES,
    ],
}  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """As logprob_cuda.library."""
    return libraries.load_cuda(LIBRARY, _SIGNATURES)


def local_statistics(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> torch.Tensor:
    """As ops.logprob_kl.reference_local_statistics, for bf16, fp16 and fp32 logits on a GPU.

    Logits of two types are copied to fp32 first.
    """
    if logits.dtype != ref_logits.dtype:
        logits, ref_logits = logits.float(), ref_logits.float()
    logits, ref_logits = libraries.rows(logits), libraries.rows(ref_logits)
    num_tokens = len(targets)
    statistics = torch.empty((7, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _launch(
            "megarl_logprob_kl_statistics", logits.device, logits.data_ptr(), ref_logits.data_ptr(),
            DTYPES[logits.dtype], targets.data_ptr(), statistics.data_ptr(), num_tokens, logits.stride(0),
            ref_logits.stride(0), num_valid, first, temperature, soft_cap or 0.0,
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
    """As ops.logprob_kl.reference_backward_into. out and logits may be the same; out's rows must be contiguous."""
    columns = (temperature, soft_cap, first, num_valid)
    if logits.dtype != ref_logits.dtype:
        wide = logits.to(torch.float32, copy=True)
        backward_into(wide, wide, ref_logits.float(), targets, merged, upstream, *columns)
        out.copy_(wide)
        return
    check_gradient(out)
    logits, ref_logits = libraries.rows(logits), libraries.rows(ref_logits)
    merged, upstream = merged.contiguous(), upstream.float().contiguous()
    num_tokens, width = logits.shape
    if num_tokens:
        _launch(
            "megarl_logprob_kl_backward", logits.device, out.data_ptr(), logits.data_ptr(), ref_logits.data_ptr(),
            DTYPES[logits.dtype], targets.data_ptr(), merged.data_ptr(), upstream.data_ptr(), num_tokens,
            out.stride(0), logits.stride(0), ref_logits.stride(0), width, num_valid, first, temperature,
            soft_cap or 0.0,
        )  # fmt: skip


def _launch(name: str, device: torch.device, *arguments) -> None:
    libraries.launch(library(), name, device, *arguments)
