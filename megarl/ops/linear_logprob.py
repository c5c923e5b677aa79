"""Log-prob, entropy and losses of them straight from hidden states: the logits live only as a chunk of tokens.

logits = hidden weight^T is the largest tensor of a training step and its three matrix products the largest of its
products: with u = 2 N V_local H FLOP for one of them,

    linear_logprob  4 u   logits, and in the backward logits again, dhidden = dlogits weight, dweight = dlogits^T hidden
    (no gradient)   1 u   logits
    linear_loss     3 u   logits, dhidden, dweight, all in the forward

and, with the exact KL to a reference model, the reference's logits of the same chunk: 1 u more, in linear_logprob's
backward another one. Nothing of the reference is kept.

linear_loss needs a loss that is a sum over tokens of a function of a token's own log-prob and entropy (PPO, GRPO and
most others; not GSPO, whose ratio is of whole sequences). The function's slopes are then known as soon as a chunk's
statistics are, dlogits is written over the chunk while it is live, and nothing is recomputed or kept but dhidden. The
statistics and dlogits of a chunk are the kernels of ops/logprob.py and ops/logprob_kl.py, the products cuBLAS's.

Memory beside hidden states and gradients: one chunk of logits, chunk_tokens x V_local of the weight's type, whatever N
is; with a reference its chunk too. Only tokens with a target are computed at all: prompts and padding cost neither
products nor memory.

Collectives, with a group of more than one rank: one all-gather of [4, chunk_tokens] statistics a chunk ([7, ...] with
a reference), and one all-reduce of dhidden; under sequence parallelism instead one all-gather of the hidden states (a
second one in the backward of linear_logprob) and one reduce-scatter of dhidden.

With the kernels of csrc/*.cpp a chunk's columns are in one piece, not its rows: a CPU's products then read the weight
and dlogits^T as they lie (3 % of the whole at V 152k in bf16, with oneDNN).

dweight is added up over chunks in fp32, straight into `weight.main_grad` where Megatron's DistributedDataParallel has
put one, else in a buffer of its own. On a CPU each chunk's product is rounded to the weight's type before it is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.ops import dispatch, logprob_kl
from megarl.ops.logprob import (
    _all_gather,
    _dense,
    backward_into,
    check_dtype,
    check_scales,
    local_statistics,
    merge_statistics,
    own_columns,
)
from megarl.ops.logprob_kl import Reference

# (log-prob [n] fp32, entropy [n] fp32, their places among the N tokens [n] int64, and with a reference the KL [n] fp32)
# -> weighted losses [n]
TokenLoss = Callable[..., torch.Tensor]

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
    has_reference: bool

    @property
    def columns(self) -> tuple[float, float | None, int, int]:
        return self.temperature, self.soft_cap, self.first, self.num_valid

    @property
    def statistics(self) -> tuple[int, int]:
        """How many numbers of a token the backward takes, and how many come out."""
        return (6, 3) if self.has_reference else (3, 2)

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
    reference: Reference | None = None,
) -> tuple[torch.Tensor, ...]:
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
    reference: (ref_hidden [N, K], ref_weight [V_local, K]) of one type, the hidden states those of all N tokens on
        every rank; asks for KL(policy || reference) as in ops/logprob_kl.py. Neither gets a gradient.

    Returns (logprob [N], entropy [N], and with a reference kl [N], in nats), fp32 (fp64 for fp64), bitwise the same on
    every rank.
    Raises ValueError for shapes, types, a temperature or a cap that do not fit, and for a main_grad that is not fp32.
    """
    scales = (temperature, soft_cap, vocab_size)
    head = _head(hidden, weight, targets, group, *scales, sequence_parallel, chunk_tokens, reference)
    return _LinearLogprob.apply(hidden, weight, targets, *_frozen(reference), head)


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
    reference: Reference | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sum of a loss over tokens, with its gradient already taken in the forward.

    token_loss: called for every chunk (once, without gradient) with (log-prob [n], entropy [n], their places among the
        N tokens [n] int64, and with a reference the KL [n]); returns the weighted losses [n], each of its own token
        only, the same on every rank. Parameters of its own would get no gradient.
    gradient_scale: what the backward's upstream gradient will be, a number or a scalar tensor (a loss scale): dweight
        is added up before that gradient is known. Any other is refused.
    The other arguments are linear_logprob's.

    Returns (loss, a scalar; logprob [N]; entropy [N]; with a reference kl [N]), all but the first without gradient, for
    metrics.
    Raises ValueError as linear_logprob; for losses that are not [n]; when called inside a backward, where a
    recomputation would add dweight twice; and in the backward, for another upstream gradient (on a GPU a device-side
    assertion) or a second backward.

    Where weight.main_grad exists, dweight is in it when the forward returns: a forward without a backward must run
    under torch.no_grad(), which computes no gradient. The backward then hands autograd what Megatron's own layers do:
    an empty gradient and `grad_added_to_main_grad`, or zeros where the weight carries `zero_out_wgrad`, as a weight
    must that is also an embedding on the same pipeline stage (Megatron sets it).
    """
    scales = (temperature, soft_cap, vocab_size)
    head = _head(hidden, weight, targets, group, *scales, sequence_parallel, chunk_tokens, reference)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        values = _LinearLogprob.apply(hidden.detach(), weight.detach(), targets, *_frozen(reference), head)
        kept = _kept(targets)
        logprob, entropy, *kl = (value[kept] for value in values)
        losses = token_loss(logprob, entropy, kept, *kl)
        _check_losses(losses, logprob)
        return losses.sum(), *values
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "linear_loss was called inside a backward, as activation recomputation does; its weight gradient would be "
            "added twice. Leave the output layer out of the recomputed part"
        )
    scale = torch.as_tensor(gradient_scale, dtype=_statistics_dtype(hidden), device=hidden.device)
    if scale.dim():
        raise ValueError(f"gradient_scale {tuple(scale.shape)} must be a number or a scalar tensor")
    return _LinearLoss.apply(hidden, weight, targets, *_frozen(reference), token_loss, scale, head)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ref_hidden, ref_weight, head):
        kept = _kept(targets)
        all_hidden = _take(_all_hidden(hidden, head), kept, targets)
        frozen = (_taken_too(ref_hidden, kept, targets), ref_weight)
        merged, values = (hidden.new_empty((n, len(kept)), dtype=_statistics_dtype(hidden)) for n in head.statistics)
        for rows, *logits in _chunks_of_logits(all_hidden, weight, *frozen, head):
            of_rows, values_of_rows = _statistics(*logits, targets[kept[rows]], head)
            merged[:, rows], values[:, rows] = of_rows, torch.stack(values_of_rows)
        ctx.save_for_backward(hidden, targets, ref_hidden, ref_weight, kept, merged)
        # Not saved: where a hook gives another tensor back (save_on_cpu), its main_grad would be missing.
        ctx.weight, ctx.head = weight, head
        ctx.set_materialize_grads(False)
        return tuple(_spread(of_kept, kept, targets) for of_kept in values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        if all(grad is None for grad in upstream):
            return (None,) * 6
        hidden, targets, ref_hidden, ref_weight, kept, merged = ctx.saved_tensors
        weight, head, needs_hidden, needs_weight = ctx.weight, ctx.head, *ctx.needs_input_grad[:2]
        all_hidden = _all_hidden(hidden, head)
        num_tokens = len(all_hidden)
        all_hidden = _take(all_hidden, kept, targets)
        frozen = (_taken_too(ref_hidden, kept, targets), ref_weight)
        upstream = [None if grad is None else _take(_dense(grad), kept, targets) for grad in upstream]
        gradients = _Gradients(all_hidden, weight, needs_hidden, needs_weight)
        for rows, *logits in _chunks_of_logits(all_hidden, weight, *frozen, head):
            slopes = [None if grad is None else grad[rows] for grad in upstream]
            _write_gradient(*logits, targets[kept[rows]], merged[:, rows], slopes, head)
            gradients.add(rows, logits[0])
        grad_hidden = gradients.of_hidden(kept, num_tokens, head)
        return (grad_hidden, _handed_over(weight, gradients.of_weight())) + (None,) * 4


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ref_hidden, ref_weight, token_loss, scale, head):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        kept = _kept(targets)
        all_hidden = _all_hidden(hidden, head)
        num_tokens = len(all_hidden)
        all_hidden = _take(all_hidden, kept, targets)
        frozen = (_taken_too(ref_hidden, kept, targets), ref_weight)
        values = hidden.new_empty((head.statistics[1], len(kept)), dtype=scale.dtype)
        loss = torch.zeros_like(scale)
        gradients = _Gradients(all_hidden, weight, needs_hidden, needs_weight)
        for rows, *logits in _chunks_of_logits(all_hidden, weight, *frozen, head):
            own = targets[kept[rows]]
            merged, values_of_rows = _statistics(*logits, own, head)
            values[:, rows] = torch.stack(values_of_rows)
            losses, slopes = _slopes(token_loss, values_of_rows, kept[rows], scale)
            loss += losses.sum()
            if any(slope is not None for slope in slopes):
                _write_gradient(*logits, own, merged, slopes, head)
                gradients.add(rows, logits[0])
        ctx.weight, ctx.scale = weight, scale
        # Saved, where tools that count what a forward keeps will find it.
        ctx.save_for_backward(gradients.of_hidden(kept, num_tokens, head), gradients.of_weight())
        ctx.spent = False
        values = tuple(_spread(of_kept, kept, targets) for of_kept in values)
        ctx.mark_non_differentiable(*values)
        return loss, *values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, *_):
        if ctx.spent:
            raise ValueError("linear_loss: a second backward; its gradients were taken in the forward, once")
        _check_upstream(upstream, ctx.scale)
        grad_hidden, grad_weight = ctx.saved_tensors
        ctx.spent = True
        return (grad_hidden, _handed_over(ctx.weight, grad_weight)) + (None,) * 6


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


def _add_weight_gradient(out: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    kernels = dispatch.path(grad_logits.device, grad_logits.dtype).kernels.get("linear_logprob")
    if kernels is None or out.dtype == grad_logits.dtype or not out.is_contiguous():
        reference_add_weight_gradient(out, grad_logits, hidden)
    else:
        kernels.add_weight_gradient(out, grad_logits, hidden)


add_weight_gradient = torch.library.custom_op(
    "megarl::linear_add_weight_gradient", _add_weight_gradient, mutates_args=("out",)
)


@add_weight_gradient.register_fake
def _(out, grad_logits, hidden):
    return None


@add_weight_gradient.register_kernel("cuda")
def _(out, grad_logits, hidden):
    if out.dtype == grad_logits.dtype or dispatch.is_refused():
        reference_add_weight_gradient(out, grad_logits, hidden)
    else:  # cuBLAS multiplies bf16 and adds in fp32
        torch.addmm(out, grad_logits.t(), hidden, out_dtype=out.dtype, out=out)


def _head(
    hidden, weight, targets, group, temperature, soft_cap, vocab_size, sequence_parallel, chunk_tokens, reference
) -> _Head:
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
    if reference is not None:
        logprob_kl.check_reference(reference, num_tokens, len(weight))
    check_dtype("hidden and weight", hidden)
    check_scales(temperature, soft_cap)
    first, num_valid = own_columns(weight.shape[0], group, vocab_size)
    if chunk_tokens is None:
        chunk_tokens = logprob_kl.chunk_tokens(CHUNK_BYTES, weight, *([] if reference is None else [reference[1]]))
    if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be a number of tokens, at least 1")
    columns = (float(temperature), soft_cap, first, num_valid)
    return _Head(group, *columns, sequence_parallel, chunk_tokens, reference is not None)


def _frozen(reference: Reference | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if reference is None else (reference[0].detach(), reference[1].detach())


def _kept(targets: torch.Tensor) -> torch.Tensor:
    """[n] int64, the tokens that have a target."""
    return (targets >= 0).nonzero()[:, 0]


def _take(values: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values if len(kept) == len(targets) else values.index_select(0, kept)


def _taken_too(ref_hidden: torch.Tensor | None, kept: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    return None if ref_hidden is None else _take(ref_hidden, kept, targets)


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


def _chunks_of_logits(hidden, weight, ref_hidden, ref_weight, head: _Head):
    """(rows, logits [n, V_local], the reference's or None), in buffers that the next chunk overwrites."""
    num_tokens = len(hidden)
    num_chunks = -(-num_tokens // head.chunk_tokens)
    size = -(-num_tokens // max(num_chunks, 1))  # even ones: a short last chunk would leave a slow product
    columns = dispatch.path(hidden.device, hidden.dtype).columns
    buffer = hidden.new_empty(size * len(weight))
    ref_buffer = ref_hidden.new_empty(size * len(weight)) if head.has_reference else None
    for start in range(0, num_tokens, max(size, 1)):
        rows = slice(start, min(start + size, num_tokens))
        logits = _product(hidden[rows], weight.detach(), buffer, columns)
        ref_logits = _product(ref_hidden[rows], ref_weight, ref_buffer, columns) if head.has_reference else None
        yield rows, logits, ref_logits


def _product(hidden: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor, columns: bool) -> torch.Tensor:
    """hidden weight^T [n, V_local] in the buffer, its rows or, if `columns`, its columns in one piece."""
    num_tokens, width = len(hidden), len(weight)
    of_call = buffer[: num_tokens * width]
    if columns:
        return torch.mm(weight, hidden.t(), out=of_call.view(width, num_tokens)).t()
    return torch.mm(hidden, weight.t(), out=of_call.view(num_tokens, width))


def _statistics(logits, ref_logits, targets, head: _Head) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(what _write_gradient takes [3 or 6, n], (logprob [n], entropy [n], any kl [n])); one all-gather."""
    if head.has_reference:
        packed = logprob_kl.local_statistics(logits, ref_logits, targets, *head.columns)
        return logprob_kl.merge(_all_gather(packed, head.group), targets, head.temperature)
    packed = _all_gather(local_statistics(logits, targets, *head.columns), head.group)
    maximum, log_sum, logprob, entropy = merge_statistics(packed, targets, head.temperature)
    return torch.stack([maximum, log_sum, entropy]), (logprob, entropy)


def _write_gradient(logits, ref_logits, targets, merged, slopes: list[torch.Tensor | None], head: _Head) -> None:
    """The gradient of the sum of slopes times values, over the logits. At least one slope is given."""
    if head.has_reference:
        given = next(slope for slope in slopes if slope is not None)
        upstream = torch.stack([torch.zeros_like(given) if slope is None else slope for slope in slopes])
        logprob_kl.backward_into(logits, logits, ref_logits, targets, merged.contiguous(), upstream, *head.columns)
    else:
        backward_into(logits, logits, targets, *merged.contiguous().unbind(), *slopes, *head.columns)


def _slopes(token_loss: TokenLoss, values, rows, scale) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(losses [n], scale times their slopes in each of the values [n]; None for one that is not used)."""
    with torch.enable_grad():
        values = [value.detach().requires_grad_() for value in values]
        logprob, entropy, *kl = values
        losses = token_loss(logprob, entropy, rows, *kl)
        _check_losses(losses, logprob)
        if not losses.requires_grad:
            return losses, [None] * len(values)
        slopes = torch.autograd.grad(losses, values, scale.to(losses.dtype).expand_as(losses), allow_unused=True)
    return losses.detach(), [None if slope is None else _dense(slope.to(logprob.dtype)) for slope in slopes]


def _check_losses(losses: torch.Tensor, logprob: torch.Tensor) -> None:
    if losses.shape != logprob.shape:
        raise ValueError(
            f"token_loss returned {tuple(losses.shape)}; it must return one loss for each of {len(logprob)}"
        )


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
    if main_grad.shape != weight.shape:
        raise ValueError(f"main_grad {tuple(main_grad.shape)} must have the weight's shape {tuple(weight.shape)}")
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
