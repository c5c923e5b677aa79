"""Log-prob, entropy and the exact KL divergence to a reference, in one read of the logits and of the reference's.

With x, m, s, t, tau as in ops/logprob.py, w the reference's logits of the same columns (capped alike), q their softmax,

    n = max_v w_v      r = sum_v exp((w_v - n) / tau)      c = sum_v exp((x_v - m) / tau) ((x_v - m) - (w_v - n)) / tau

    KL(p || q) = sum_v p_v (log p_v - log q_v) = c / s - log s + log r
    d KL / d x_v = p_v (log p_v - log q_v - KL) / tau

and a cap multiplies the slope as it does the others. Shards merge exactly: with N = max_r n_r, e_r = (n_r - N) / tau
and M, d_r, s as there,

    r = sum_r exp(e_r) r_r             c = sum_r exp(d_r) (c_r + (d_r - e_r) s_r)

so one all-gather of a packed [7, N] tensor is all that the forward sends, and the backward sends nothing. c is a sum of
differences, not a difference of sums: two distributions that are nearly the same keep their digits.

The reference's logits are given, or made of its hidden states and weight a chunk of tokens at a time, in the forward
and again in the backward: a matrix product (2 N V_local K FLOP) for each, and nothing of [N, V_local] is stored.

Bytes per element of [N, V] in bf16: 4 forward, 10 forward and backward. A column that the reference masks (-inf) and
the policy does not has an infinite KL; it comes out as 1e30 times its probability, or a few times that.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.ops.dispatch import dispatched
from megarl.ops.logprob import (
    _LN_2,
    _LOWEST_SHIFT,
    _all_gather,
    _capped,
    _check,
    _chunks_of_tokens,
    _own_column,
    _shift_to_base_2,
    _statistics_dtype,
    check_dtype,
    check_scales,
    merge_statistics,
)

# (hidden states [N, K], output weight [V_local, K]) of the reference model
Reference = tuple[torch.Tensor, torch.Tensor]

# Of one chunk of the reference's logits.
CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 256 << 20}

# Of the reference's exponents, which are multiplied by p and must keep their size where a probability need not:
# finite, so that 0 times it is 0.
_LOWEST_REF_SHIFT = -1e30


def logprob_entropy_and_kl(
    logits: torch.Tensor,
    reference: torch.Tensor | Reference,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob of each target, entropy of each distribution and its KL divergence to the reference's, in nats.

    reference: its logits [N, V_local] of any floating type, this rank's columns; or (ref_hidden [N, K], ref_weight
        [V_local, K]) of one type, the hidden states the same on every rank. Gets no gradient.
    The other arguments are logprob_and_entropy's; temperature and cap apply to both logits.

    Returns (logprob [N], entropy [N], kl [N]), fp32 (fp64 for fp64 logits), bitwise the same on every rank; 0 where a
    target is negative. Raises ValueError for shapes, types, a temperature or a cap that do not fit.
    """
    first, num_valid = _check(logits, targets, group, vocab_size)
    check_scales(temperature, soft_cap)
    if isinstance(reference, tuple):
        check_reference(reference, *logits.shape)
        ref_logits, ref_hidden, ref_weight = None, *(tensor.detach() for tensor in reference)
    else:
        if not isinstance(reference, torch.Tensor) or reference.shape != logits.shape:
            given = tuple(reference.shape) if isinstance(reference, torch.Tensor) else reference
            raise ValueError(
                f"reference {given} must be logits {tuple(logits.shape)}, or a tuple of hidden states and weight"
            )
        check_dtype("the reference's logits", reference)
        ref_logits, ref_hidden, ref_weight = reference.detach(), None, None
    columns = (float(temperature), soft_cap, first, num_valid)
    return _LogprobEntropyAndKL.apply(
        logits, ref_logits, ref_hidden, ref_weight, targets.contiguous(), group, columns, inplace_backward
    )


def check_reference(reference: Reference, num_tokens: int, width: int) -> None:
    """ValueError where a reference's hidden states and weight do not make logits [num_tokens, width]."""
    if not isinstance(reference, tuple) or len(reference) != 2:
        raise ValueError(f"reference {type(reference).__name__} must be a tuple of hidden states and weight")
    hidden, weight = reference
    if hidden.shape != (num_tokens, weight.shape[-1]) or weight.shape[:-1] != (width,) or hidden.dtype != weight.dtype:
        raise ValueError(
            f"reference: hidden states {tuple(hidden.shape)} {hidden.dtype} and weight {tuple(weight.shape)} "
            f"{weight.dtype} must be [{num_tokens}, K] and [{width}, K] of one type"
        )


class _LogprobEntropyAndKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ref_logits, ref_hidden, ref_weight, targets, group, columns, inplace_backward):
        statistics = logits.new_empty((7, len(targets)), dtype=_statistics_dtype(logits.dtype))
        for rows, of_reference in _chunks_of_reference(ref_logits, ref_hidden, ref_weight):
            statistics[:, rows] = local_statistics(logits[rows], of_reference, targets[rows], *columns)
        merged, values = merge(_all_gather(statistics, group), targets, columns[0])
        ctx.save_for_backward(logits, ref_logits, ref_hidden, ref_weight, targets, merged)
        ctx.columns, ctx.inplace_backward = columns, inplace_backward
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        logits, ref_logits, ref_hidden, ref_weight, targets, merged = ctx.saved_tensors
        logits, upstream = logits.detach(), torch.stack(upstream)
        out = logits if ctx.inplace_backward else torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows, of_reference in _chunks_of_reference(ref_logits, ref_hidden, ref_weight):
            of_rows = (targets[rows], merged[:, rows].contiguous(), upstream[:, rows].contiguous())
            backward_into(out[rows], logits[rows], of_reference, *of_rows, *ctx.columns)
        return (out,) + (None,) * 7


def _chunks_of_reference(ref_logits, ref_hidden, ref_weight):
    """(rows, the reference's logits of them): all where they are given, else chunks in a buffer that is used again."""
    if ref_logits is not None:
        yield slice(None), ref_logits
        return
    size = chunk_tokens(CHUNK_BYTES, ref_weight)
    buffer = ref_hidden.new_empty((min(size, len(ref_hidden)), len(ref_weight)))
    for start in range(0, len(ref_hidden), size):
        hidden = ref_hidden[start : start + size]
        yield slice(start, start + size), torch.mm(hidden, ref_weight.t(), out=buffer[: len(hidden)])


def chunk_tokens(chunk_bytes: dict[str, int], *weights: torch.Tensor) -> int:
    """How many tokens' logits of these weights [V_local, ...] fit into the bytes for their device; at least one."""
    row_bytes = sum(len(weight) * weight.element_size() for weight in weights)
    return max(1, chunk_bytes.get(weights[0].device.type, chunk_bytes["cuda"]) // row_bytes)


def merge(
    packed: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """[ranks, 7, N] local statistics -> what the backward takes, and (logprob, entropy, kl), of the whole vocabulary.

    The former is [6, N]: m, log s, entropy, n, log r, kl.
    """
    maximum, log_sum, logprob, entropy = merge_statistics(packed[:, :4], targets, temperature)
    maxima, sums, ref_maxima, ref_sums, differences = packed[:, [0, 1, 4, 5, 6]].unbind(dim=1)
    ref_maximum = ref_maxima.amax(dim=0)
    shift = maxima.sub(maximum).div_(temperature).clamp_(min=_LOWEST_SHIFT)
    ref_shift = ref_maxima.sub(ref_maximum).div_(temperature).clamp_(min=_LOWEST_REF_SHIFT)
    ref_log_sum = (ref_shift.exp() * ref_sums).sum(dim=0).log()
    difference = (shift.exp() * (differences + (shift - ref_shift) * sums)).sum(dim=0)
    kl = (difference / log_sum.exp() - log_sum + ref_log_sum).masked_fill(targets < 0, 0)
    return torch.stack([maximum, log_sum, entropy, ref_maximum, ref_log_sum, kl]), (logprob, entropy, kl)


def reference_local_statistics(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    soft_cap: float | None,
    first: int,
    num_valid: int,
) -> torch.Tensor:
    """[7, N] (m, s, t, x_y, n, r, c) over this rank's first `num_valid` columns, whose ids start at `first`.

    The first four as in ops/logprob.py; n is -inf and r, c are 0 where a row has no finite logit here or is ignored.
    """
    infinity = torch.inf
    nothing = logits.new_tensor(
        [-infinity, 0.0, 0.0, -infinity, -infinity, 0.0, 0.0], dtype=_statistics_dtype(logits.dtype)
    )[:, None]
    statistics = nothing.repeat(1, len(targets))
    for rows, x, exponentials in _chunks_of_tokens(logits, targets, num_valid):
        _capped(x.copy_(logits[rows, :num_valid]), soft_cap)
        w = _capped(ref_logits[rows, :num_valid].to(x.dtype, copy=True), soft_cap)
        column, owned = _own_column(targets[rows], first, num_valid)
        statistics[0, rows], statistics[4, rows] = x.amax(dim=-1), w.amax(dim=-1)
        statistics[3, rows] = x.gather(1, column[:, None])[:, 0].masked_fill_(~owned, -infinity)
        _shift_to_base_2(x, statistics[0, rows], temperature).clamp_(min=_LOWEST_SHIFT)
        _shift_to_base_2(w, statistics[4, rows], temperature).clamp_(min=_LOWEST_REF_SHIFT)
        statistics[5, rows] = torch.exp2(w, out=exponentials).sum(dim=-1)
        statistics[1, rows] = torch.exp2(x, out=exponentials).sum(dim=-1)
        statistics[6, rows] = w.sub_(x).mul_(exponentials).sum(dim=-1).mul_(-_LN_2)
        statistics[2, rows] = exponentials.mul_(x).sum(dim=-1).mul_(_LN_2)
    return torch.where(targets < 0, nothing, statistics)


def reference_backward_into(
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
    """Write the gradient in the logits of the sum of `upstream` times (logprob, entropy, kl) to `out` [N, V_local].

    out: like logits, or the logits themselves. merged: [6, N] of `merge`. upstream: [3, N].
    """
    out[:, num_valid:] = 0
    scaled = upstream / temperature
    for rows, log2_p, grad in _chunks_of_tokens(logits, targets, num_valid):
        maximum, log_sum, entropy, ref_maximum, ref_log_sum, kl = merged[:, rows]
        of_logprob, of_entropy, of_kl = scaled[:, rows]
        _capped(log2_p.copy_(logits[rows, :num_valid]), soft_cap)
        log2_q = _capped(ref_logits[rows, :num_valid].to(log2_p.dtype, copy=True), soft_cap)
        _shift_to_base_2(log2_p, maximum, temperature).sub_(log_sum[:, None] / _LN_2).clamp_(min=_LOWEST_SHIFT)
        _shift_to_base_2(log2_q, ref_maximum, temperature).sub_(ref_log_sum[:, None] / _LN_2)
        log2_q.clamp_(min=_LOWEST_REF_SHIFT)
        # p (offset + of_kl (log p - log q) - of_entropy log p), and of_logprob more at the target.
        torch.exp2(log2_p, out=grad)
        slope = log2_q.sub_(log2_p).mul_((-_LN_2 * of_kl)[:, None]).sub_(log2_p.mul_((_LN_2 * of_entropy)[:, None]))
        grad.mul_(slope.sub_((of_logprob + of_entropy * entropy + of_kl * kl)[:, None]))
        column, owned = _own_column(targets[rows], first, num_valid)
        grad.scatter_add_(1, column[:, None], of_logprob.masked_fill(~owned, 0)[:, None])
        if soft_cap is not None:
            tanh = log2_p.copy_(logits[rows, :num_valid]).div_(soft_cap).tanh_()
            grad.addcmul_(grad, tanh.square_(), value=-1)
        out[rows, :num_valid] = grad
    out.index_fill_(0, (targets < 0).nonzero()[:, 0], 0)


local_statistics = torch.library.custom_op(
    "megarl::logprob_kl_local_statistics", dispatched("logprob_kl", reference_local_statistics), mutates_args=()
)
backward_into = torch.library.custom_op(
    "megarl::logprob_kl_backward_into", dispatched("logprob_kl", reference_backward_into), mutates_args=("out",)
)


@local_statistics.register_fake
def _(logits, ref_logits, targets, *columns):
    return logits.new_empty((7, targets.shape[0]), dtype=_statistics_dtype(logits.dtype))


@backward_into.register_fake
def _(out, *arguments):
    return None
