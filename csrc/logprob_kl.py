"""Triton kernels of ops/logprob_kl.py: log-prob, entropy and exact KL of two given logits, and their gradient.

Per row of logits and ref_logits [N, V_local], with x and w the (soft-capped) logits over the valid columns, z_v =
(x_v - m) / temperature, u_v = (w_v - n) / temperature and y the target (ops/logprob_kl.py explains the statistics and
merges the shards):

    statistics:  m = max x        s = sum exp z        t = sum z exp z              x_y (or -inf)
                 n = max w        r = sum exp u        c = sum exp z (z - u)
    backward:    d = p_v (g_kl (log p_v - log q_v - kl) - g_entropy (log p_v + entropy) - g_logprob) + g_logprob [v = y]
                 dlogits = d / temperature (times the cap's slope 1 - tanh^2), and 0 in padded columns

Forward: one program per row reads both rows once, in blocks, with running statistics that are rescaled when a block
raises a maximum. Backward: one program per row and block, out of place or over the logits. Bytes per token in bf16:
4 V_local forward, 6 V_local backward; an ignored token reads nothing and costs the 2 V_local of its zeros. FLOPs per
element: two exponentials and about 12 others forward, one and about 14 backward; both are bound by memory. All
arithmetic is fp32, exponents are taken in base 2.
"""

import math

import torch
import triton
import triton.language as tl

from megarl.csrc.logprob import _num_warps, _rows, _tanh

_FORWARD_BLOCK = 4096
_BACKWARD_BLOCK = 4096
_LN_2 = math.log(2)


def local_statistics(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> torch.Tensor:
    """As ops.logprob_kl.reference_local_statistics, for bf16, fp16 and fp32 logits on the kernel's device."""
    logits, ref_logits = _rows(logits), _rows(ref_logits)
    num_tokens = len(targets)
    statistics = torch.empty((7, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        block = min(_FORWARD_BLOCK, triton.next_power_of_2(max(num_valid, 1)))
        statistics_kernel[(num_tokens,)](
            logits, ref_logits, targets, statistics, logits.stride(0), ref_logits.stride(0), num_tokens, num_valid,
            first, 1 / (temperature * _LN_2), soft_cap or 0.0, HAS_CAP=soft_cap is not None, BLOCK=block,
            num_warps=_num_warps(block),
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
    num_tokens, width = logits.shape
    if out.stride(1) != 1:
        raise ValueError(
            f"the gradient's strides {out.stride()} must end in 1: call .contiguous() on the logits before the op"
        )
    logits, ref_logits = _rows(logits), _rows(ref_logits)
    if num_tokens:
        block = min(_BACKWARD_BLOCK, triton.next_power_of_2(width))
        backward_kernel[(num_tokens, triton.cdiv(width, block))](
            out, logits, ref_logits, targets, merged.contiguous(), upstream.float().contiguous(), out.stride(0),
            logits.stride(0), ref_logits.stride(0), num_tokens, width, num_valid, first, 1 / (temperature * _LN_2),
            1 / temperature, soft_cap or 0.0, HAS_CAP=soft_cap is not None, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip


@triton.jit
def statistics_kernel(
    logits, ref_logits, targets, statistics, row_stride, ref_stride, num_tokens, num_valid, first, scale, soft_cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    ref_logits += row * ref_stride
    column = tl.load(targets + row)
    # A negative target is an ignored token: no column is read.
    num_read = tl.where(column < 0, 0, num_valid)
    column -= first
    running_max = tl.full((), -3.4028234663852886e38, tl.float32)
    ref_max = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    ref_total = tl.full((), 0.0, tl.float32)
    difference = tl.full((), 0.0, tl.float32)
    for start in range(0, num_read, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        read = columns < num_read
        x = tl.load(logits + columns, mask=read, other=float("-inf")).to(tl.float32)
        w = tl.load(ref_logits + columns, mask=read, other=float("-inf")).to(tl.float32)
        if HAS_CAP:
            x = tl.where(read, soft_cap * _tanh(x / soft_cap), float("-inf"))
            w = tl.where(read, soft_cap * _tanh(w / soft_cap), float("-inf"))
        new_max = tl.maximum(running_max, tl.max(x, axis=0))
        new_ref_max = tl.maximum(ref_max, tl.max(w, axis=0))
        # where, not maximum: a NaN must stay one. The reference's exponents are multiplied by p and keep their size.
        z = (x - new_max) * scale
        z = tl.where(z < -1.0e4, -1.0e4, z)
        u = (w - new_ref_max) * scale
        u = tl.where(u < -1.0e30, -1.0e30, u)
        exponentials = tl.exp2(z)
        shift = (running_max - new_max) * scale
        shift = tl.where(shift < -1.0e4, -1.0e4, shift)
        ref_shift = (ref_max - new_ref_max) * scale
        ref_shift = tl.where(ref_shift < -1.0e30, -1.0e30, ref_shift)
        rescale = tl.exp2(shift)
        difference = rescale * (difference + (shift - ref_shift) * total) + tl.sum(exponentials * (z - u), axis=0)
        weighted = rescale * (weighted + shift * total) + tl.sum(exponentials * z, axis=0)
        total = rescale * total + tl.sum(exponentials, axis=0)
        ref_total = tl.exp2(ref_shift) * ref_total + tl.sum(tl.exp2(u), axis=0)
        running_max = new_max
        ref_max = new_ref_max
    owned = (column >= 0) & (column < num_read)
    target = tl.load(logits + column, mask=owned, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        target = tl.where(owned, soft_cap * _tanh(target / soft_cap), float("-inf"))
    tl.store(statistics + row, tl.where(total == 0, float("-inf"), running_max))
    tl.store(statistics + num_tokens + row, total)
    tl.store(statistics + 2 * num_tokens + row, weighted * LN_2)
    tl.store(statistics + 3 * num_tokens + row, target)
    tl.store(statistics + 4 * num_tokens + row, tl.where(ref_total == 0, float("-inf"), ref_max))
    tl.store(statistics + 5 * num_tokens + row, ref_total)
    tl.store(statistics + 6 * num_tokens + row, difference * LN_2)


@triton.jit
def backward_kernel(
    out, logits, ref_logits, targets, merged, upstream, out_stride, row_stride, ref_stride, num_tokens, width,
    num_valid, first, scale, inverse_temperature, soft_cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < tl.where(target < 0, 0, num_valid)
    x = tl.load(logits + row * row_stride + columns, mask=valid, other=float("-inf")).to(tl.float32)
    w = tl.load(ref_logits + row * ref_stride + columns, mask=valid, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        tanh = _tanh(x / soft_cap)
        x = soft_cap * tanh
        w = soft_cap * _tanh(w / soft_cap)
    entropy = tl.load(merged + 2 * num_tokens + row)
    kl = tl.load(merged + 5 * num_tokens + row)
    of_logprob = tl.load(upstream + row)
    of_entropy = tl.load(upstream + num_tokens + row)
    of_kl = tl.load(upstream + 2 * num_tokens + row)
    # A maximum of -inf, where every column is masked, counts as the lowest finite number.
    x_max = tl.load(merged + row)
    x_max = tl.where(x_max < -3.4028234663852886e38, -3.4028234663852886e38, x_max)
    w_max = tl.load(merged + 3 * num_tokens + row)
    w_max = tl.where(w_max < -3.4028234663852886e38, -3.4028234663852886e38, w_max)
    log2_p = (x - x_max) * scale - tl.load(merged + num_tokens + row) / LN_2
    log2_p = tl.where(log2_p < -1.0e4, -1.0e4, log2_p)
    log2_q = (w - w_max) * scale - tl.load(merged + 4 * num_tokens + row) / LN_2
    log2_q = tl.where(log2_q < -1.0e30, -1.0e30, log2_q)
    slope = of_kl * ((log2_p - log2_q) * LN_2 - kl) - of_entropy * (log2_p * LN_2 + entropy) - of_logprob
    grad = tl.exp2(log2_p) * slope
    grad += tl.where(columns == target - first, of_logprob, 0.0)
    grad *= inverse_temperature
    if HAS_CAP:
        grad *= 1.0 - tanh * tanh
    tl.store(
        out + row * out_stride + columns, tl.where(valid, grad, 0.0).to(out.dtype.element_ty), mask=columns < width
    )
