"""What linear_logprob.py has of its own on a CPU: the weight gradient with linear_logprob.cpp, which setup.py builds as
liblinear_logprob_cpu_*.so, and the memory of a chunk of logits."""

import ctypes
import mmap
from functools import cache
from pathlib import Path

import torch

from megarl.csrc import libraries
from megarl.csrc.libraries import ADDRESS, INT, LONG
from megarl.csrc.logprob_cpu import DTYPES

SOURCE = Path(__file__).with_name("linear_logprob.cpp")

_SIGNATURES = {"megarl_linear_logprob_add_cpu": [ADDRESS, ADDRESS, INT, LONG]}

# Rows of one product, which is added while it is in a core's cache: 0.9 MiB at H 896.
_TILE = 512


@cache
def library() -> ctypes.CDLL | None:
    """As logprob_cpu.library."""
    return libraries.load_cpu(SOURCE, _SIGNATURES)


def buffer(like: torch.Tensor, size: int) -> torch.Tensor:
    """[size] of `like`'s type, on large pages where Linux gives some: a page fault per 2 MiB, not one per 4 KiB."""
    values = like.new_empty(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = max(0, (values.data_ptr() + values.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE)
        _libc().madvise(first, length, mmap.MADV_HUGEPAGE)  # advice: a kernel without large pages refuses it
    return values


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ADDRESS, ctypes.c_size_t, INT]
    return libc


def add_weight_gradient(out: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """As ops.linear_logprob.reference_add_weight_gradient, for a contiguous fp32 `out` and the others in bf16."""
    tile = hidden.new_empty((min(_TILE, len(out)), out.shape[1]))
    for start in range(0, len(out), _TILE):
        sums = out[start : start + _TILE]
        product = torch.mm(grad_logits[:, start : start + _TILE].t(), hidden, out=tile[: len(sums)])
        if torch.get_num_threads() > 1:  # torch's are awake from the product; others would have to be started
            sums.add_(product)
            continue
        arguments = (sums.data_ptr(), product.data_ptr(), DTYPES[product.dtype], product.numel())
        code = library().megarl_linear_logprob_add_cpu(*arguments)
        assert code == 0, code
