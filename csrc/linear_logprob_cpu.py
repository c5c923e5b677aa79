"""The weight gradient with linear_logprob.cpp; in liblinear_logprob_cpu_*.so, which setup.py builds."""

import ctypes
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
