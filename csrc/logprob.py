"""Triton kernels of ops/logprob.py: log-prob and entropy of vocabulary-parallel logits, and their gradient.

Per row of logits [N, V_local], with z = logits / temperature over the valid columns and y the target (ops/logprob.py
explains the statistics and merges the shards):

    statistics:  m = max z        s = sum exp(z - m)        t = sum (z - m) exp(z - m)        z_y (or -inf)
    backward:    d = p_v (-g_logprob - g_entropy (log p_v + entropy)) + g_logprob [v = y],   log p_v = z_v - m - log s
                 dlogits = d / temperature, and 0 in padded columns

Forward: one program per row reads it once, in blocks, with a running (m, s, t) that is rescaled when a block raises the
maximum. Backward: one program per row and block, out of place or over the logits (each element is read and written by
the same program). Bytes per token: 2 V_local forward in bf16, 4 V_local backward. FLOPs per element: one exponential
and about 6 others forward, one and about 8 backward; both are bound by memory. All arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl

_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 4096


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, first: int, num_valid: int
) -> torch.Tensor:
    """As ops.logprob.reference_local_statistics, for bf16, fp16 and fp32 logits on the kernel's device."""
    logits = _rows(logits)
    num_tokens = len(targets)
    statistics = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        block = min(_FORWARD_BLOCK, triton.next_power_of_2(max(num_valid, 1)))
        statistics_kernel[(num_tokens,)](
            logits, targets, statistics, logits.stride(0), num_tokens, num_valid, first, temperature,
            BLOCK=block, num_warps=_num_warps(block),
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
    first: int,
    num_valid: int,
) -> None:
    """As ops.logprob.reference_backward_into. out and logits may be the same tensor; out's rows must be contiguous."""
    num_tokens, width = logits.shape
    if out.stride(1) != 1:
        raise ValueError(
            f"the gradient's strides {out.stride()} must end in 1: call .contiguous() on the logits before the op"
        )
    logits = _rows(logits)
    if num_tokens:
        block = min(_BACKWARD_BLOCK, triton.next_power_of_2(width))
        # A gradient that is not given is neither loaded nor used, but a kernel argument needs some address.
        backward_kernel[(num_tokens, triton.cdiv(width, block))](
            out, logits, targets, maximum, log_sum, entropy,
            entropy if grad_logprob is None else grad_logprob,
            entropy if grad_entropy is None else grad_entropy,
            out.stride(0), logits.stride(0), width, num_valid, first, temperature,
            HAS_GRAD_LOGPROB=grad_logprob is not None, HAS_GRAD_ENTROPY=grad_entropy is not None,
            BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip


@triton.jit
def statistics_kernel(
    logits, targets, statistics, row_stride, num_tokens, num_valid, first, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    running_max = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < num_valid, other=float("-inf")).to(tl.float32) / temperature
        new_max = tl.maximum(running_max, tl.max(z, axis=0))
        # where, not maximum: a NaN must stay one. exp(-1e4) is 0, and 0 * -1e4 is 0 where 0 * -inf would be NaN.
        shifted = tl.where(z - new_max < -1.0e4, -1.0e4, z - new_max)
        exponentials = tl.exp(shifted)
        shift = tl.where(running_max - new_max < -1.0e4, -1.0e4, running_max - new_max)
        scale = tl.exp(shift)
        weighted = scale * (weighted + shift * total) + tl.sum(exponentials * shifted, axis=0)
        total = scale * total + tl.sum(exponentials, axis=0)
        running_max = new_max
    column = tl.load(targets + row) - first
    owned = (column >= 0) & (column < num_valid)
    target = tl.load(logits + column, mask=owned, other=float("-inf")).to(tl.float32) / temperature
    tl.store(statistics + row, tl.where(total == 0, float("-inf"), running_max))
    tl.store(statistics + num_tokens + row, total)
    tl.store(statistics + 2 * num_tokens + row, weighted)
    tl.store(statistics + 3 * num_tokens + row, target)


@triton.jit
def backward_kernel(
    out, logits, targets, maximum, log_sum, entropy, grad_logprob, grad_entropy, out_stride, row_stride, width,
    num_valid, first, temperature, HAS_GRAD_LOGPROB: tl.constexpr, HAS_GRAD_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < num_valid
    z = tl.load(logits + row * row_stride + columns, mask=valid, other=float("-inf")).to(tl.float32) / temperature
    log_p = z - tl.load(maximum + row) - tl.load(log_sum + row)
    log_p = tl.where(log_p < -1.0e4, -1.0e4, log_p)
    slope = tl.zeros((BLOCK,), tl.float32)
    if HAS_GRAD_ENTROPY:
        slope -= tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    if HAS_GRAD_LOGPROB:
        slope -= tl.load(grad_logprob + row)
    grad = tl.exp(log_p) * slope
    if HAS_GRAD_LOGPROB:
        target = tl.load(targets + row) - first
        grad += tl.where(columns == target, tl.load(grad_logprob + row), 0.0)
    grad = tl.where(valid, grad / temperature, 0.0)
    tl.store(out + row * out_stride + columns, grad.to(out.dtype.element_ty), mask=columns < width)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256))
