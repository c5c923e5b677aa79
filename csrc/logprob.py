"""Triton kernels of ops/logprob.py: log-prob and entropy of vocabulary-parallel logits, and their gradient.

They run where logprob.cu is not compiled. Per row of logits [N, V_local], with x the (soft-capped) logits over the
valid columns, z_v = (x_v - m) / temperature and y the target (ops/logprob.py explains the statistics and merges the
shards):

    statistics:  m = max x        s = sum exp z_v        t = sum z_v exp z_v        x_y (or -inf)
    backward:    d = p_v (-g_logprob - g_entropy (log p_v + entropy)) + g_logprob [v = y],   log p_v = z_v - log s
                 dlogits = d / temperature (times the cap's slope 1 - tanh^2), and 0 in padded columns

Forward: one program per row reads it once, in blocks, with a running (m, s, t) that is rescaled when a block raises the
maximum. Backward: one program per row and block, out of place or over the logits (each element is read and written by
the same program). Bytes per token: 2 V_local forward in bf16, 4 V_local backward, of which an ignored token costs the
2 V_local of its zeros. FLOPs per element: one exponential and about 6 others forward, one and about 8 backward; both
are bound by memory. All arithmetic is fp32, exponents are taken in base 2.
"""

import math

import torch
import triton
import triton.language as tl

_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 4096
_LN_2 = math.log(2)


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, soft_cap: float | None, first: int, num_valid: int
) -> torch.Tensor:
    """As ops.logprob.reference_local_statistics, for bf16, fp16 and fp32 logits on the kernel's device."""
    logits = _rows(logits)
    num_tokens = len(targets)
    statistics = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        block = min(_FORWARD_BLOCK, triton.next_power_of_2(max(num_valid, 1)))
        statistics_kernel[(num_tokens,)](
            logits, targets, statistics, logits.stride(0), num_tokens, num_valid, first, 1 / (temperature * _LN_2),
            soft_cap or 0.0, HAS_CAP=soft_cap is not None, BLOCK=block, num_warps=_num_warps(block),
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
    logits = _rows(logits)
    if num_tokens:
        block = min(_BACKWARD_BLOCK, triton.next_power_of_2(width))
        # A gradient that is not given is neither loaded nor used, but a kernel argument needs some address.
        backward_kernel[(num_tokens, triton.cdiv(width, block))](
            out, logits, targets, maximum, log_sum, entropy,
            entropy if grad_logprob is None else grad_logprob,
            entropy if grad_entropy is None else grad_entropy,
            out.stride(0), logits.stride(0), width, num_valid, first, 1 / (temperature * _LN_2), 1 / temperature,
            soft_cap or 0.0, HAS_CAP=soft_cap is not None,
            HAS_GRAD_LOGPROB=grad_logprob is not None, HAS_GRAD_ENTROPY=grad_entropy is not None,
            BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip


@triton.jit
def _tanh(x):
    # Of an fp32 x: off by 1e-7 at most, which a cap of 50 makes 5e-6 of a logit.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def statistics_kernel(
    logits, targets, statistics, row_stride, num_tokens, num_valid, first, scale, soft_cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.load(targets + row)
    # A negative target is an ignored token: no column is read, and (m, s, t) are (-inf, 0, 0).
    num_read = tl.where(column < 0, 0, num_valid)
    column -= first
    running_max = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_read, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < num_read, other=float("-inf")).to(tl.float32)
        if HAS_CAP:
            x = tl.where(columns < num_read, soft_cap * _tanh(x / soft_cap), float("-inf"))
        new_max = tl.maximum(running_max, tl.max(x, axis=0))
        # where, not maximum: a NaN must stay one. exp2(-1e4) is 0, and 0 * -1e4 is 0 where 0 * -inf would be NaN.
        shifted = (x - new_max) * scale
        shifted = tl.where(shifted < -1.0e4, -1.0e4, shifted)
        exponentials = tl.exp2(shifted)
        shift = (running_max - new_max) * scale
        shift = tl.where(shift < -1.0e4, -1.0e4, shift)
        rescale = tl.exp2(shift)
        weighted = rescale * (weighted + shift * total) + tl.sum(exponentials * shifted, axis=0)
        total = rescale * total + tl.sum(exponentials, axis=0)
        running_max = new_max
    owned = (column >= 0) & (column < num_read)
    target = tl.load(logits + column, mask=owned, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        target = tl.where(owned, soft_cap * _tanh(target / soft_cap), float("-inf"))
    tl.store(statistics + row, tl.where(total == 0, float("-inf"), running_max))
    tl.store(statistics + num_tokens + row, total)
    tl.store(statistics + 2 * num_tokens + row, weighted * LN_2)
    tl.store(statistics + 3 * num_tokens + row, target)


@triton.jit
def backward_kernel(
    out, logits, targets, maximum, log_sum, entropy, grad_logprob, grad_entropy, out_stride, row_stride, width,
    num_valid, first, scale, inverse_temperature, soft_cap, HAS_CAP: tl.constexpr, HAS_GRAD_LOGPROB: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < tl.where(target < 0, 0, num_valid)
    x = tl.load(logits + row * row_stride + columns, mask=valid, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        tanh = _tanh(x / soft_cap)
        x = soft_cap * tanh
    log2_p = (x - tl.load(maximum + row)) * scale - tl.load(log_sum + row) / LN_2
    log2_p = tl.where(log2_p < -1.0e4, -1.0e4, log2_p)
    slope = tl.zeros((BLOCK,), tl.float32)
    if HAS_GRAD_ENTROPY:
        slope -= tl.load(grad_entropy + row) * (log2_p * LN_2 + tl.load(entropy + row))
    if HAS_GRAD_LOGPROB:
        slope -= tl.load(grad_logprob + row)
    grad = tl.exp2(log2_p) * slope
    if HAS_GRAD_LOGPROB:
        grad += tl.where(columns == target - first, tl.load(grad_logprob + row), 0.0)
    grad *= inverse_temperature
    if HAS_CAP:
        grad *= 1.0 - tanh * tanh
    tl.store(
        out + row * out_stride + columns, tl.where(valid, grad, 0.0).to(out.dtype.element_ty), mask=columns < width
    )


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256))
