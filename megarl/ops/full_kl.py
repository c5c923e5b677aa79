"""The exact KL divergence of two vocabulary-parallel distributions, with gradient, and no second [N, V] buffer.

With z = logits / temperature of the policy, w = (ref_hidden ref_weight^T) / temperature of the reference, both over the
valid columns of one token, p = softmax(z) and q = softmax(w):

    KL(p || q) = sum_v p_v (log p_v - log q_v)              d KL / d z_v = p_v (log p_v - log q_v - KL)

A rank that owns some of the columns computes, with m = max z, n = max w,

    s = sum exp(z_v - m)        r = sum exp(w_v - n)        c = sum exp(z_v - m) ((z_v - m) - (w_v - n))

and shards merge exactly: with M = max m, N = max n over the ranks, d = m - M and e = n - N of each,

    KL = sum exp(d) (c + (d - e) s) / S - log S + log R     S = sum exp(d) s,   R = sum exp(e) r

so one all-gather of a packed [5, N] tensor is all that the forward sends, and the backward sends nothing.

The reference's logits live only as a chunk of tokens, in the forward and again in the backward: one GEMM unit
(2 x N x V_local x H FLOP) for each. Beyond the logits and their gradient there are a few buffers of CHUNK_ELEMENTS.
Statistics are fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.ops.logprob import _LOWEST_SHIFT, _all_gather, _check, _chunks, _scaled, _shifted, _statistics_dtype


def full_kl(
    logits: torch.Tensor,
    ref_hidden: torch.Tensor,
    ref_weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """[N] KL(softmax(logits / temperature) || softmax(reference's logits / temperature)), in nats.

    logits: [N, V_local] bf16, fp16, fp32 or fp64, this rank's columns as in logprob_and_entropy. Differentiable, once.
    ref_hidden: [N, H], the same on every rank. ref_weight: [V_local, H], this rank's rows. Both get no gradient.
    group, temperature, vocab_size: as in logprob_and_entropy.

    Returns fp32 (fp64 for fp64 logits), bitwise the same on every rank. Raises ValueError for shapes, types or a
    temperature that do not fit.
    """
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)  # there are none to check
    _, num_valid = _check(logits, targets, group, vocab_size)
    if ref_hidden.shape != (len(logits), ref_weight.shape[-1]) or ref_weight.shape[:-1] != logits.shape[1:]:
        raise ValueError(
            f"logits {tuple(logits.shape)}, ref_hidden {tuple(ref_hidden.shape)} and ref_weight "
            f"{tuple(ref_weight.shape)} must be [N, V_local], [N, H] and [V_local, H]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0")
    return _FullKL.apply(logits, ref_hidden.detach(), ref_weight.detach(), group, float(temperature), num_valid)


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ref_hidden, ref_weight, group, temperature, num_valid):
        packed = _local_statistics(logits, ref_hidden, ref_weight, temperature, num_valid)
        z_offset, w_offset, kl = _merged(_all_gather(packed, group))
        ctx.save_for_backward(logits, ref_hidden, ref_weight, z_offset, w_offset, kl)
        ctx.options = (temperature, num_valid)
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, ref_hidden, ref_weight, z_offset, w_offset, kl = ctx.saved_tensors
        temperature, num_valid = ctx.options
        out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        for rows in _chunks(logits):
            z, w = _both(logits, ref_hidden, ref_weight, rows, temperature, num_valid)
            log_p, log_q = _shifted(z, z_offset[rows]), _shifted(w, w_offset[rows])
            slope = (grad[rows] / temperature)[:, None] * (log_p - log_q - kl[rows, None])
            out[rows, :num_valid] = log_p.exp_().mul_(slope).to(out.dtype)
        return (out,) + (None,) * 5


def _both(logits, ref_hidden, ref_weight, rows: slice, temperature: float, num_valid: int):
    """(z, w), [rows, num_valid] each."""
    reference = ref_hidden[rows].to(ref_weight.dtype) @ ref_weight[:num_valid].T
    z = _scaled(logits[rows, :num_valid], temperature)
    return z, _scaled(reference, temperature).to(z.dtype)


def _local_statistics(logits, ref_hidden, ref_weight, temperature: float, num_valid: int) -> torch.Tensor:
    """[5, N] (m, s, n, r, c) over this rank's first `num_valid` columns; m, n are -inf and s, r, c 0 without any."""
    statistics = logits.new_zeros((5, len(logits)), dtype=_statistics_dtype(logits.dtype))
    if num_valid == 0:
        statistics[[0, 2]] = -torch.inf
        return statistics
    for rows in _chunks(logits):
        z, w = _both(logits, ref_hidden, ref_weight, rows, temperature, num_valid)
        statistics[0, rows], statistics[2, rows] = z.amax(dim=-1), w.amax(dim=-1)
        z, w = _shifted(z, statistics[0, rows]), _shifted(w, statistics[2, rows])
        exponentials = z.exp()
        statistics[1, rows] = exponentials.sum(dim=-1)
        statistics[3, rows] = w.exp().sum(dim=-1)
        statistics[4, rows] = exponentials.mul_(z.sub_(w)).sum(dim=-1)
    return statistics


def _merged(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[ranks, 5, N] -> (M + log S, N + log R, KL), each [N], of the whole vocabulary."""
    m, s, n, r, c = packed.unbind(dim=1)
    highest, ref_highest = m.amax(dim=0), n.amax(dim=0)
    d, e = (m - highest).clamp(min=_LOWEST_SHIFT), (n - ref_highest).clamp(min=_LOWEST_SHIFT)
    total, ref_total = (d.exp() * s).sum(dim=0), (e.exp() * r).sum(dim=0)
    kl = (d.exp() * (c + (d - e) * s)).sum(dim=0) / total - total.log() + ref_total.log()
    return highest + total.log(), ref_highest + ref_total.log(), kl
