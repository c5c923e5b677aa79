"""Log-prob, entropy and losses of them straight from hidden states: the logits live only as a chunk of tokens.

logits = hidden weight^T is the largest tensor of a training step and its three matrix products the largest of its
products: with u = 2 N V_local H FLOP for one of them,

    linear_logprob  4 u   logits, and in the backward logits again, dhidden = dlogits weight, dweight = dlogits^T hidden
    (no gradient)   1 u   logits
    linear_loss     3 u   logits, dhidden, dweight, all in the forward

linear_loss needs a loss that is a sum over tokens of a function of a token's own log-prob and entropy (PPO, GRPO and
most others; not GSPO, whose ratio is of whole sequences). The function's slopes are then known as soon as a chunk's
statistics are, dlogits is written over the chunk while it is live, and nothing is recomputed or kept but dhidden. The
statistics and dlogits of a chunk are the kernels of ops/logprob.py, the products cuBLAS's.

Memory beside hidden states and gradients: one chunk of logits, chunk_tokens x V_local of the weight's type, whatever N
is. Only tokens with a target are computed at all: prompts and padding cost neither products nor memory.

Collectives, with a group of more than one rank: one all-gather of [4, chunk_tokens] statistics a chunk, and one
all-reduce of dhidden; under sequence parallelism instead one all-gather of the hidden states (a second one in the
backward of linear_logprob) and one reduce-scatter of dhidden.

dweight is added up over chunks in fp32, straight into `weight.main_grad` where Megatron's DistributedDataParallel has
put one, else in a buffer of its own. On a CPU each chunk's product is rounded to the weight's type before it is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.ops.logprob import (
    _all_gather,
    _dense,
    backward_into,
    check_scales,
    local_statistics,
    merge_statistics,
    own_columns,
)

# (log-prob [n] fp32, entropy [n] fp32, their places among the N tokens [n] int64) -> weighted losses [n]
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Of one chunk of logits. The GPU's is larger because every chunk reads and writes dweight once: at 3,500 tokens that
# is the time of a quarter of the chunk's product.
CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 1 << 30}

# Columns of one product of the CPU's weight gradient: what is rounded and added while it is in the cache.
_TILE = 1024


@dataclass(frozen=True)
class _Head:
    """What a call has fixed; `first` and `num_valid` as in ops/logprob.py."""

    group: dist.ProcessGroup | None
    temperature: float
    soft_cap: float | None
    first: int
    num_valid: int
    sequence_parallel: bool
    chunk_tokens: int

    @property
    def columns(self) -> tuple[float, float | None, int, int]:
        return self.temperature, self.soft_cap, self.first, self.num_valid

    @property
    def sharded(self) -> bool:
        return self.group is not None and dist.get_world_size(self.group) > 1


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each distribution, under softmax(hidden weight^T / temperature).

    hidden: [N, H] bf16, fp16, fp32 or fp64, the same on every rank of `group`; with sequence_parallel this rank's
        [N / ranks, H]. Differentiable, once.
    weight: [V_local, H] of the same type; rank r of `group` owns the vocabulary ids [r * V_local, (r + 1) * V_local).
        Differentiable, once: into `weight.main_grad`, an fp32 [V_local, H], where there is one.
    targets: [N] int64 vocabulary ids, the same on every rank. A negative one (-100, by custom) marks a token to leave
        out: its log-prob and entropy are 0, and nothing is computed for it. On a GPU counting them synchronises.
    group, temperature, vocab_size, soft_cap: as in ops.logprob.logprob_and_entropy.
    sequence_parallel: hidden states come, and their gradient goes, cut over the ranks of `group`.
    chunk_tokens: tokens whose logits live at a time; None: as many as CHUNK_BYTES hold.

    Returns (logprob [N], entropy [N], in nats), fp32 (fp64 for fp64), bitwise the same on every rank.
    Raises ValueError for shapes, types, a temperature or a cap that do not fit, and for a main_grad that is not fp32.
    """
    head = _head(hidden, weight, targets, group, temperature, vocab_size, soft_cap, sequence_parallel, chunk_tokens)
    return _LinearLogprob.apply(hidden, weight, targets, head)


def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    token_loss: TokenLoss,
    gradient_scale: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of a loss over tokens, with its gradient already taken in the forward.

    token_loss: called for every chunk with (log-prob [n], entropy [n], their places among the N tokens [n] int64);
        returns the weighted losses [n], each of its own token only, the same on every rank.
    gradient_scale: what the backward's upstream gradient will be, a number or a scalar tensor (a loss scale): dweight
        is added up before that gradient is known. Any other is refused.
    The other arguments are linear_logprob's.

    Returns (loss, a scalar; logprob [N]; entropy [N]), the last two without gradient, for metrics.
    Raises ValueError as linear_logprob; for losses that are not [n]; when called inside a backward, where a
    recomputation would add dweight twice; and in the backward, for another upstream gradient (on a GPU a device-side
    assertion) or a second backward.

    Where weight.main_grad exists, dweight is in it when the forward returns: a forward without a backward must run
    under torch.no_grad(), which computes no gradient. The backward then hands autograd what Megatron's own layers do:
    an empty gradient and `grad_added_to_main_grad`, or zeros where the weight carries `zero_out_wgrad`, as a weight
    must that is also an embedding on the same pipeline stage (Megatron sets it).
    """
    head = _head(hidden, weight, targets, group, temperature, vocab_size, soft_cap, sequence_parallel, chunk_tokens)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        logprob, entropy = _LinearLogprob.apply(hidden.detach(), weight.detach(), targets, head)
        kept = _kept(targets)
        return token_loss(logprob[kept], entropy[kept], kept).sum(), logprob, entropy
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "linear_loss was called inside a backward, as activation recomputation does; its weight gradient would be "
            "added twice. Leave the output layer out of the recomputed part"
        )
    scale = torch.as_tensor(gradient_scale, dtype=_statistics_dtype(hidden), device=hidden.device)
    return _LinearLoss.apply(hidden, weight, targets, token_loss, scale, head)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, head):
        kept = _kept(targets)
        all_hidden = _take(_all_hidden(hidden, head), kept, targets)
        statistics = hidden.new_empty((4, len(kept)), dtype=_statistics_dtype(hidden))
        for rows, logits in _chunks_of_logits(all_hidden, weight, head):
            statistics[:, rows] = torch.stack(_statistics(logits, targets[kept[rows]], head))
        ctx.save_for_backward(hidden, weight, targets, kept, *statistics.unbind())
        ctx.head = head
        ctx.set_materialize_grads(False)
        logprob, entropy = (_spread(of_kept, kept, targets) for of_kept in statistics[2:])
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, targets, kept, maximum, log_sum, _, entropy = ctx.saved_tensors
        head, needs_hidden, needs_weight = ctx.head, *ctx.needs_input_grad[:2]
        all_hidden = _all_hidden(hidden, head)
        num_tokens = len(all_hidden)
        all_hidden = _take(all_hidden, kept, targets)
        upstream = [
            None if grad is None else _take(_dense(grad), kept, targets) for grad in (grad_logprob, grad_entropy)
        ]
        gradients = _Gradients(all_hidden, weight, needs_hidden, needs_weight)
        for rows, logits in _chunks_of_logits(all_hidden, weight, head):
            slopes = (None if grad is None else grad[rows] for grad in upstream)
            own = (targets[kept[rows]], maximum[rows], log_sum[rows], entropy[rows])
            backward_into(logits, logits, *own, *slopes, *head.columns)
            gradients.add(rows, logits)
        grad_hidden = gradients.of_hidden(kept, num_tokens, head)
        return grad_hidden, _handed_over(weight, gradients.of_weight()), None, None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_loss, scale, head):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        kept = _kept(targets)
        all_hidden = _all_hidden(hidden, head)
        num_tokens = len(all_hidden)
        all_hidden = _take(all_hidden, kept, targets)
        values = hidden.new_empty((2, len(kept)), dtype=scale.dtype)
        loss = torch.zeros_like(scale)
        gradients = _Gradients(all_hidden, weight, needs_hidden, needs_weight)
        for rows, logits in _chunks_of_logits(all_hidden, weight, head):
            own = targets[kept[rows]]
            maximum, log_sum, logprob, entropy = _statistics(logits, own, head)
            values[0, rows], values[1, rows] = logprob, entropy
            losses, slopes = _slopes(token_loss, logprob, entropy, kept[rows], scale)
            loss += losses.sum()
            if any(slope is not None for slope in slopes):
                backward_into(logits, logits, own, maximum, log_sum, entropy, *slopes, *head.columns)
                gradients.add(rows, logits)
        ctx.weight, ctx.scale = weight, scale
        ctx.gradients = (gradients.of_hidden(kept, num_tokens, head), gradients.of_weight())
        logprob, entropy = (_spread(of_kept, kept, targets) for of_kept in values)
        ctx.mark_non_differentiable(logprob, entropy)
        return loss, logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, *_):
        if ctx.gradients is None:
            raise ValueError("linear_loss: a second backward; its gradients were taken in the forward, once")
        _check_upstream(upstream, ctx.scale)
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None
        return (grad_hidden, _handed_over(ctx.weight, grad_weight)) + (None,) * 4


class _Gradients:
    """dhidden and dweight of a call, added up chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, needs_hidden: bool, needs_weight: bool):
        self.hidden, self.weight = hidden, weight
        self.grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        self.grad_weight = _accumulator(weight) if needs_weight else None

    def add(self, rows: slice, grad_logits: torch.Tensor) -> None:
        if self.grad_hidden is not None:
            torch.mm(grad_logits, self.weight.detach(), out=self.grad_hidden[rows])
        if self.grad_weight is not None:
            add_weight_gradient(self.grad_weight, grad_logits, self.hidden[rows].detach())

    def of_hidden(self, kept: torch.Tensor, num_tokens: int, head: _Head) -> torch.Tensor | None:
        """[N, H], or this rank's [N / ranks, H]: summed over the ranks' columns, 0 for tokens without a target."""
        grad, self.grad_hidden = self.grad_hidden, None
        if grad is None:
            return None
        if len(kept) < num_tokens:
            grad = grad.new_zeros((num_tokens, grad.shape[1])).index_copy_(0, kept, grad)
        if not head.sharded:
            return grad
        if not head.sequence_parallel:
            dist.all_reduce(grad, group=head.group)
            return grad
        own = grad.new_empty((num_tokens // dist.get_world_size(head.group), grad.shape[1]))
        dist.reduce_scatter_tensor(own, grad, group=head.group)
        return own

    def of_weight(self) -> torch.Tensor | None:
        """[V_local, H] of the weight's type; None where it is in main_grad, or not wanted."""
        grad, self.grad_weight = self.grad_weight, None
        return None if grad is None or grad is _main_grad(self.weight) else grad.to(self.weight.dtype)


def reference_add_weight_gradient(out: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """out [V_local, H] += grad_logits^T hidden, of [n, V_local] and [n, H]; out is fp32, or of their type."""
    if out.dtype == grad_logits.dtype:
        torch.addmm(out, grad_logits.t(), hidden, out=out)
        return
    for start in range(0, len(out), _TILE):
        tile = slice(start, start + _TILE)
        out[tile].add_(torch.mm(grad_logits[:, tile].t(), hidden))


add_weight_gradient = torch.library.custom_op(
    "megarl::linear_add_weight_gradient", reference_add_weight_gradient, mutates_args=("out",)
)


@add_weight_gradient.register_fake
def _(out, grad_logits, hidden):
    return None


@add_weight_gradient.register_kernel("cuda")
def _(out, grad_logits, hidden):
    if out.dtype == grad_logits.dtype:
        torch.addmm(out, grad_logits.t(), hidden, out=out)
    else:  # cuBLAS multiplies bf16 and adds in fp32
        torch.addmm(out, grad_logits.t(), hidden, out_dtype=out.dtype, out=out)


def _head(hidden, weight, targets, group, temperature, vocab_size, soft_cap, sequence_parallel, chunk_tokens) -> _Head:
    ranks = 1 if group is None else dist.get_world_size(group)
    num_tokens = len(hidden) * (ranks if sequence_parallel else 1)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} and weight {tuple(weight.shape)} {weight.dtype} must be "
            "[N, H] and [V_local, H] of one type; flatten the batch dimensions"
        )
    if targets.shape != (num_tokens,) or targets.dtype != torch.int64:
        raise ValueError(
            f"targets {tuple(targets.shape)} {targets.dtype} must be [{num_tokens}] int64: one for each hidden state "
            "of every rank"
        )
    check_scales(temperature, soft_cap)
    if chunk_tokens is None:
        row_bytes = weight.shape[0] * weight.element_size()
        chunk_tokens = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]) // row_bytes)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be at least 1")
    first, num_valid = own_columns(weight.shape[0], group, vocab_size)
    return _Head(group, float(temperature), soft_cap, first, num_valid, sequence_parallel, chunk_tokens)


def _kept(targets: torch.Tensor) -> torch.Tensor:
    """[n] int64, the tokens that have a target."""
    return (targets >= 0).nonzero()[:, 0]


def _take(values: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values if len(kept) == len(targets) else values.index_select(0, kept)


def _spread(of_kept: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n] -> [N], a tensor of its own with 0 where a token has no target."""
    return of_kept.new_zeros(len(targets)).index_copy_(0, kept, of_kept)


def _all_hidden(hidden: torch.Tensor, head: _Head) -> torch.Tensor:
    hidden = hidden.detach().contiguous()
    if not (head.sequence_parallel and head.sharded):
        return hidden
    gathered = hidden.new_empty((dist.get_world_size(head.group) * len(hidden), hidden.shape[1]))
    dist.all_gather_into_tensor(gathered, hidden, group=head.group)
    return gathered


def _chunks_of_logits(hidden: torch.Tensor, weight: torch.Tensor, head: _Head):
    """(rows, logits [n, V_local]) over all tokens, the logits in one buffer that the next chunk overwrites."""
    num_tokens = len(hidden)
    num_chunks = -(-num_tokens // head.chunk_tokens)
    size = -(-num_tokens // max(num_chunks, 1))  # even ones: a short last chunk would leave a slow product
    buffer = hidden.new_empty((size, len(weight)))
    for start in range(0, num_tokens, max(size, 1)):
        rows = slice(start, min(start + size, num_tokens))
        yield rows, torch.mm(hidden[rows], weight.detach().t(), out=buffer[: rows.stop - start])


def _statistics(logits: torch.Tensor, targets: torch.Tensor, head: _Head) -> tuple[torch.Tensor, ...]:
    """(maximum, log_sum, logprob, entropy), each [n]; one all-gather."""
    packed = local_statistics(logits, targets, *head.columns)
    return merge_statistics(_all_gather(packed, head.group), targets, head.temperature)


def _slopes(token_loss: TokenLoss, logprob, entropy, rows, scale) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(losses [n], scale times their slopes in log-prob and entropy [n]; None for one that is not used)."""
    with torch.enable_grad():
        values = (logprob.detach().requires_grad_(), entropy.detach().requires_grad_())
        losses = token_loss(*values, rows)
        if losses.shape != logprob.shape:
            raise ValueError(
                f"token_loss returned {tuple(losses.shape)}; it must return one loss for each of {len(rows)}"
            )
        if not losses.requires_grad:
            return losses, [None, None]
        slopes = torch.autograd.grad(losses, values, scale.to(losses.dtype).expand_as(losses), allow_unused=True)
    return losses.detach(), [None if slope is None else _dense(slope.to(logprob.dtype)) for slope in slopes]


def _statistics_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    return getattr(weight, "main_grad", None)


def _accumulator(weight: torch.Tensor) -> torch.Tensor:
    """Where dweight is added up: the weight's main_grad, or zeros."""
    main_grad = _main_grad(weight)
    if main_grad is None:
        return torch.zeros_like(weight, dtype=_statistics_dtype(weight), memory_format=torch.contiguous_format)
    if main_grad.dtype != torch.float32:
        raise ValueError(f"main_grad of {main_grad.dtype} must be float32: set grad_reduce_in_fp32=True")
    return main_grad


def _handed_over(weight: torch.Tensor, grad_weight: torch.Tensor | None) -> torch.Tensor | None:
    """What the backward gives autograd for the weight; its hooks must run even when main_grad has everything."""
    if not weight.requires_grad or _main_grad(weight) is None or not hasattr(weight, "grad_added_to_main_grad"):
        return grad_weight
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _check_upstream(upstream: torch.Tensor, scale: torch.Tensor) -> None:
    message = (
        "linear_loss: its gradients were taken in the forward for another upstream gradient; pass that as "
        "gradient_scale, and scale the loss by its weights alone"
    )
    if upstream.is_cuda:
        torch._assert_async(upstream == scale, message)
    elif upstream != scale:
        raise ValueError(f"{message} (expected {scale.item()}, got {upstream.item()})")
