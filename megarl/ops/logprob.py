"""Log-probability and entropy of a token under vocabulary-parallel logits, in one read and one collective.

With x the logits of one token over the valid columns, soft-capped (cap tanh(x / cap)) where a cap is given, tau the
temperature, and y its target,

    m = max_v x_v      s = sum_v exp((x_v - m) / tau)      t = sum_v (x_v - m) / tau exp((x_v - m) / tau)

    logprob = (x_y - m) / tau - log s                      p_v = exp((x_v - m) / tau) / s
    entropy = log s - t / s

    d logprob / d x_v = ([v = y] - p_v) / tau              d entropy / d x_v = -p_v (log p_v + entropy) / tau

and a cap multiplies both by its slope 1 - tanh^2. A rank that owns some of the columns computes (m, s, t, x_y) of its
own. Shards merge exactly: with M = max_r m_r and d_r = (m_r - M) / tau,

    s = sum_r exp(d_r) s_r             t = sum_r exp(d_r) (t_r + d_r s_r)             x_y = the owner's

so one all-gather of a packed [4, N] tensor is all that the forward sends, and the backward sends nothing: each rank
holds its own columns, and the upstream gradients are the same on every rank. Everything is taken about the maximum,
and only then divided by the temperature, so that large logits cost no digits.

Passes and bytes per element of [N, V], in bf16: the forward reads the logits once (2 bytes), the backward reads them
and writes their gradient (4 bytes): 6 V_local bytes per token, and of a token without a target only the zeros of its
gradient (2). Statistics are fp32 (fp64 for fp64 logits). The torch reference below works on chunks of tokens in two
buffers that it reuses, of CHUNK_ELEMENTS fp32 elements each (one row, where a row is longer), whatever N is.

Every call with a group sends 16 N bytes per rank in one message (greedy_match too: its two rows are fp64).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megarl.ops.dispatch import dispatched

# 128 Ki fp32 elements are half a MiB: a chunk and its exponentials stay in a core's cache.
CHUNK_ELEMENTS = 1 << 17

# exp(-1e4) and exp2(-1e4) are exactly 0 in fp32 and fp64, and 0 * -1e4 is 0 where 0 * -inf would be NaN: a masked
# column adds nothing.
_LOWEST_SHIFT = -1e4

_LN_2 = math.log(2)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def logprob_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each distribution, both under softmax(logits / temperature).

    logits: [N, V_local] bf16, fp16, fp32 or fp64, this rank's columns: rank r of `group` owns the vocabulary ids
        [r * V_local, (r + 1) * V_local). Differentiable, once.
    targets: [N] int64 vocabulary ids, the same on every rank. A negative one (-100, by custom) marks a token to ignore:
        its logits are not read, its log-prob, entropy and gradient are 0.
    group: the tensor-parallel group; None when this rank owns every column.
    temperature: divides the logits, > 0.
    vocab_size: columns at or beyond this id are padding: they have probability 0 and gradient 0. None: no padding.
    inplace_backward: let the backward write the gradient over the logits. For a caller that knows that nobody else
        needs them afterwards; a second backward through the same logits is then refused by autograd.
    soft_cap: replaces the logits by soft_cap * tanh(logits / soft_cap) before the temperature (Gemma 2,
        https://arxiv.org/abs/2408.00118, section 2), > 0. A logit of -inf then becomes -soft_cap and counts.

    Returns (logprob [N], entropy [N], in nats), fp32 (fp64 for fp64 logits), bitwise the same on every rank. A target
    outside the valid columns has log-prob -inf; a row with no finite logit anywhere is NaN.
    Raises ValueError for shapes, types, a temperature or a cap that do not fit.
    """
    first, num_valid = _check(logits, targets, group, vocab_size)
    check_scales(temperature, soft_cap)
    targets = targets.contiguous()
    scales = (float(temperature), soft_cap)
    return _LogprobAndEntropy.apply(logits, targets, group, *scales, first, num_valid, inplace_backward)


@torch.no_grad()
def greedy_match(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """[N] bool: is the target what greedy decoding picks? Among equal logits the lowest id is picked, over shards too.

    Arguments as in logprob_and_entropy; one all-gather of a packed [2, N] fp64 tensor (maximum, its id).
    """
    first, num_valid = _check(logits, targets, group, vocab_size)
    if num_valid:
        # argmax, unlike max, documents that it returns the first of equal maxima.
        index = logits[:, :num_valid].argmax(dim=-1)
        maximum = logits.gather(1, index[:, None])[:, 0]
    else:
        index = torch.zeros_like(targets)
        maximum = logits.new_full(targets.shape, -torch.inf)
    packed = _all_gather(torch.stack([maximum.double(), (index + first).double()]), group)
    owner = packed[:, 0].argmax(dim=0, keepdim=True)
    return packed[:, 1].gather(0, owner)[0] == targets


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, temperature, soft_cap, first, num_valid, inplace_backward):
        packed = local_statistics(logits, targets, temperature, soft_cap, first, num_valid)
        maximum, log_sum, logprob, entropy = merge_statistics(_all_gather(packed, group), targets, temperature)
        ctx.save_for_backward(logits, targets, maximum, log_sum, entropy)
        ctx.options = (temperature, soft_cap, first, num_valid)
        ctx.inplace_backward = inplace_backward
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 8
        logits, targets, maximum, log_sum, entropy = ctx.saved_tensors
        logits = logits.detach()
        out = logits if ctx.inplace_backward else torch.empty_like(logits, memory_format=torch.contiguous_format)
        upstream = (_dense(grad_logprob), _dense(grad_entropy))
        backward_into(out, logits, targets, maximum, log_sum, entropy, *upstream, *ctx.options)
        return (out,) + (None,) * 7


def merge_statistics(
    packed: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[ranks, 4, N] local statistics -> (m, log s, logprob, entropy), each [N], of the whole vocabulary."""
    maxima, sums, weighted, target = packed.unbind(dim=1)
    maximum = maxima.amax(dim=0)
    shift = maxima.sub(maximum).div_(temperature).clamp_(min=_LOWEST_SHIFT)
    scale = shift.exp()
    total = (scale * sums).sum(dim=0)
    log_sum = total.log()
    logprob = (target.amax(dim=0) - maximum) / temperature - log_sum
    entropy = log_sum - (scale * (weighted + shift * sums)).sum(dim=0) / total
    ignored = targets < 0
    return maximum, log_sum, logprob.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def reference_local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, soft_cap: float | None, first: int, num_valid: int
) -> torch.Tensor:
    """[4, N] (m, s, t, x_y) over this rank's first `num_valid` columns, whose ids start at `first`.

    m is -inf and s, t are 0 where a row has no finite logit here, or its token is ignored; x_y is -inf where another
    rank owns the target.
    """
    nothing = logits.new_tensor([-torch.inf, 0.0, 0.0, -torch.inf], dtype=_statistics_dtype(logits.dtype))[:, None]
    statistics = nothing.repeat(1, len(targets))
    maximum, total, weighted, target = statistics
    for rows, x, exponentials in _chunks_of_tokens(logits, targets, num_valid):
        _capped(x.copy_(logits[rows, :num_valid]), soft_cap)
        torch.amax(x, dim=-1, out=maximum[rows])
        _shift_to_base_2(x, maximum[rows], temperature).clamp_(min=_LOWEST_SHIFT)
        torch.sum(torch.exp2(x, out=exponentials), dim=-1, out=total[rows])
        torch.sum(exponentials.mul_(x), dim=-1, out=weighted[rows])
    weighted.mul_(_LN_2)
    if num_valid:
        column, owned = _own_column(targets, first, num_valid)
        of_target = _capped(logits.gather(1, column[:, None])[:, 0].to(target.dtype), soft_cap)
        target.copy_(of_target.masked_fill(~owned, -torch.inf))
    return torch.where(targets < 0, nothing, statistics)


def reference_backward_into(
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
    """Write the gradient of sum(grad_logprob * logprob + grad_entropy * entropy) in the logits to `out` [N, V_local].

    out: like logits, or the logits themselves. maximum, log_sum, entropy: [N], merged over the group.
    A gradient that is None is zero and costs nothing; at least one is given.
    """
    out[:, num_valid:] = 0
    origin = maximum.clamp(min=torch.finfo(maximum.dtype).min)[:, None]
    log2_sum, to_base_2 = (log_sum / _LN_2)[:, None], 1 / (temperature * _LN_2)
    # The gradient is p (offset + slope log2 p), and at_target more at the target.
    offset = torch.zeros_like(maximum)[:, None]
    if grad_logprob is not None:
        at_target = grad_logprob[:, None] / temperature
        offset -= at_target
        column, owned = (of_rows[:, None] for of_rows in _own_column(targets, first, max(num_valid, 1)))
        at_target.masked_fill_(~owned, 0)
    if grad_entropy is not None:
        slope = grad_entropy[:, None] / -temperature
        offset.addcmul_(slope, entropy[:, None])
        slope *= _LN_2
    for rows, log2_p, grad in _chunks_of_tokens(logits, targets, num_valid):
        _capped(log2_p.copy_(logits[rows, :num_valid]), soft_cap).sub_(origin[rows])
        log2_p.mul_(to_base_2).sub_(log2_sum[rows]).clamp_(min=_LOWEST_SHIFT)
        torch.exp2(log2_p, out=grad)
        if grad_entropy is None:
            grad.mul_(offset[rows])
        else:
            grad.mul_(log2_p.mul_(slope[rows]).add_(offset[rows]))
        if grad_logprob is not None:
            grad.scatter_add_(1, column[rows], at_target[rows])
        if soft_cap is not None:
            tanh = log2_p.copy_(logits[rows, :num_valid]).div_(soft_cap).tanh_()
            grad.addcmul_(grad, tanh.square_(), value=-1)
        out[rows, :num_valid].copy_(grad)
    out.index_fill_(0, (targets < 0).nonzero()[:, 0], 0)


local_statistics = torch.library.custom_op(
    "megarl::logprob_local_statistics", dispatched("logprob", reference_local_statistics), mutates_args=()
)
backward_into = torch.library.custom_op(
    "megarl::logprob_backward_into", dispatched("logprob", reference_backward_into), mutates_args=("out",)
)


@local_statistics.register_fake
def _(logits, targets, temperature, soft_cap, first, num_valid):
    return logits.new_empty((4, targets.shape[0]), dtype=_statistics_dtype(logits.dtype))


@backward_into.register_fake
def _(out, logits, *arguments):
    return None


def check_scales(temperature: float, soft_cap: float | None) -> None:
    """ValueError where logits cannot be scaled like that."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0; for greedy decoding compare with greedy_match")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap {soft_cap} must be > 0 and finite, or None for logits without a cap")


def check_dtype(name: str, values: torch.Tensor) -> None:
    """ValueError where there are no statistics of such values."""
    if values.dtype not in DTYPES:
        raise ValueError(f"{name} of {values.dtype} must be bfloat16, float16, float32 or float64")


def own_columns(width: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """(id of this rank's first column, number of its columns that are not padding), where each rank has `width`."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if vocab_size is None:
        vocab_size = ranks * width
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= ranks * width:
        raise ValueError(
            f"vocab_size {vocab_size} must lie in 1..{ranks * width}: {ranks} ranks hold {width} columns each"
        )
    first = rank * width
    return first, min(max(vocab_size - first, 0), width)


def _check(logits, targets, group, vocab_size) -> tuple[int, int]:
    """(id of this rank's first column, number of its columns that are not padding)."""
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} {targets.dtype} must be [N, V_local] and "
            "[N] int64; flatten the batch dimensions"
        )
    check_dtype("logits", logits)
    return own_columns(logits.shape[1], group, vocab_size)


def _all_gather(packed: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[ranks, *packed.shape]; one collective, none when this rank is alone."""
    if group is None or dist.get_world_size(group) == 1:
        return packed[None]
    gathered = packed.new_empty((dist.get_world_size(group) * packed.shape[0], *packed.shape[1:]))
    dist.all_gather_into_tensor(gathered, packed, group=group)
    return gathered.view(-1, *packed.shape)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(logits: torch.Tensor) -> list[slice]:
    num_tokens, width = logits.shape
    rows = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, start + rows) for start in range(0, num_tokens, rows)]


def _chunks_of_tokens(logits: torch.Tensor, targets: torch.Tensor, num_valid: int):
    """(rows, buffer, buffer) for every chunk with a token to compute; the buffers [rows, num_valid] are used again."""
    chunks = _chunks(logits) if num_valid else []
    num_rows = max((len(targets[rows]) for rows in chunks), default=0)
    dtype = _statistics_dtype(logits.dtype)
    first, second = (logits.new_empty((num_rows, num_valid), dtype=dtype) for _ in range(2))
    kept = (targets >= 0).tolist()
    for rows in chunks:
        if any(kept[rows]):
            size = len(kept[rows])
            yield rows, first[:size], second[:size]


def _capped(x: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """x itself, now soft_cap * tanh(x / soft_cap)."""
    return x if soft_cap is None else x.div_(soft_cap).tanh_().mul_(soft_cap)


def _shift_to_base_2(x: torch.Tensor, origin: torch.Tensor, temperature: float) -> torch.Tensor:
    """x itself [n, V], now (x - origin) / temperature / ln 2; an origin [n] of -inf counts as the lowest finite number.

    For torch.exp2, which takes a third of the time of torch.exp on a CPU and is as exact.
    """
    return x.sub_(origin.clamp(min=torch.finfo(origin.dtype).min)[:, None]).mul_(1 / (temperature * _LN_2))


def _own_column(targets: torch.Tensor, first: int, num_valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    column = targets - first
    owned = (column >= 0) & (column < num_valid)
    return column.clamp(0, num_valid - 1), owned


def _dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous: kernels read by address, and `sum().backward()` sends one number with stride 0."""
    return None if grad is None else grad.contiguous()
