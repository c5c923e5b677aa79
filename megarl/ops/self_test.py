"""The self-test of the log-prob ops at the start of a run: what the run will compute, on a few tokens, against fp64.

The run's own hidden size, vocabulary with its padding, type, temperature and tensor-parallel group; inputs from a seed,
the same on every rank: logits of standard deviation 0.5 to 1.5 after the temperature, targets from the first to the
last id, one token ignored. Values, and gradients by the vector: each token's dhidden, each vocabulary id's dweight or
dlogits, so that an id of probability 1e-6 is looked at as closely as a target. Every rank of the group comes to the
same verdict. Kernels meet the whole vocabulary; linear_loss, which adds matrix products to them, as many of each rank's
rows as WEIGHT_ELEMENTS holds: all of them on a GPU, on a CPU what takes well under a second.

A path that fails is given up for the torch reference in the rest of the process, with a warning; a reference that fails
is an error. Memory: the weight, its fp32 gradient and five fp64 tensors of [NUM_TOKENS, V], gone when it returns.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.errors import MegarlError
from megarl.ops import dispatch, linear_logprob, logprob, logprob_kl
from megarl.ops.linear_logprob import linear_loss
from megarl.ops.logprob import _all_gather, check_scales, logprob_and_entropy, own_columns
from megarl.ops.logprob_kl import logprob_entropy_and_kl

NUM_TOKENS = 8
IGNORED = 3

# What fp32 statistics allow: log-prob and entropy in nats, the KL relative to the largest, gradients relative to the
# size of their terms. From hidden states the logits themselves are rounded to the type, by a unit in the last place of
# 6 at most, and all else follows them; with very few ids the errors do not average out. That would hide a kernel's own
# errors, so kernels are tested on given logits as well.
OF_LOGITS = {
    torch.float32: {"log-prob of logits": 2e-5, "entropy of logits": 2e-5, "KL of logits": 2e-5, "dlogits": 1e-5},
    torch.float16: {"log-prob of logits": 2e-5, "entropy of logits": 2e-5, "KL of logits": 2e-3, "dlogits": 1e-3},
    torch.bfloat16: {"log-prob of logits": 2e-5, "entropy of logits": 2e-5, "KL of logits": 1e-2, "dlogits": 8e-3},
}
FROM_HIDDEN = {
    torch.float32: {"log-prob": 2e-5, "entropy": 2e-5, "KL": 2e-5, "dhidden": 3e-5, "dweight": 2e-5},
    torch.float16: {"log-prob": 5e-3, "entropy": 2e-3, "KL": 2e-3, "dhidden": 2e-3, "dweight": 8e-3},
    torch.bfloat16: {"log-prob": 4e-2, "entropy": 1e-2, "KL": 1e-2, "dhidden": 2e-2, "dweight": 5e-2},
}

# Added to the norms that gradients are relative to: fp16 has no number between 0 and 6e-8.
_UNDERFLOW = {torch.float32: 1e-30, torch.float16: 1e-4, torch.bfloat16: 1e-30}

# Of the output weight that linear_loss is tested with, by device.
WEIGHT_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 30}

# Rows of the weight are those of a table this long, scaled anew at each repetition: a large table takes long to draw.
_TABLE_ROWS = 4093

# Rows of the weight in fp64 at a time: what stays in the cache.
_TILE = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What the run computes with, and how far that is from fp64 at most, over all ranks of the group."""

    op: str  # "linear_loss", "logprob_and_entropy" or "logprob_entropy_and_kl"
    path: str  # "CUDA C++", "Triton", "C++" or "torch"
    errors: dict[str, float]  # by what was compared: the keys of OF_LOGITS and, fused, of FROM_HIDDEN
    tolerances: dict[str, float]  # of the same
    given_up: str | None = None  # why `path` is the torch reference although there are kernels

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {error:.1e} ({self.tolerances[name]:.0e})" for name, error in self.errors.items())
        return f"{self.op} by {self.path}; errors against fp64 (allowed): {shown}"

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerances[name] for name, error in self.errors.items())


def check(
    hidden_size: int,
    vocab_size: int,
    rows_local: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
    with_kl: bool = False,
    fused: bool = True,
    soft_cap: float | None = None,
) -> Report:
    """Compare what this run computes with fp64, and give up kernels that are wrong. Collective over `group`.

    hidden_size: of the model's last hidden states.
    vocab_size: ids that are not padding. rows_local: V_local, rows of the output weight on each rank of `group`.
    dtype: of hidden states and weight: float32, float16 or bfloat16.
    group, temperature, soft_cap: as the run passes them to the ops.
    with_kl: the run needs the exact KL to a reference.
    fused: the run takes linear_loss, which is then tested beside the op on logits.

    Raises ValueError for a type without tolerances, and for sizes, a temperature or a cap that the ops refuse;
    MegarlError when the torch reference is wrong too.
    """
    if dtype not in OF_LOGITS:
        raise ValueError(f"no tolerances for {dtype}; the self-test knows {', '.join(map(str, OF_LOGITS))}")
    check_scales(temperature, soft_cap)
    scales = (float(temperature), soft_cap)
    case = _case(hidden_size, vocab_size, rows_local, dtype, group, torch.device(device), with_kl, *scales)
    on_kernels = dispatch.path(case.weight.device, dtype) is not dispatch.TORCH
    raised = _raised(case, fused) if on_kernels else None
    on_kernels, somebody_raised = _agreed([on_kernels, raised is not None], case)
    given_up = None
    if somebody_raised:
        given_up = f"{raised or 'the kernels of another rank raised an error'}. {_remedy()}"
        dispatch.use_reference(given_up)
    report = _report(case, fused, given_up)
    if not report.passed and on_kernels and not given_up:
        given_up = f"{_worst(report)}. {_remedy()}"
        dispatch.use_reference(given_up)
        report = _report(case, fused, given_up)
    if not report.passed:
        raise MegarlError(
            f"{_worst(report)}; this installation cannot be trained with. Look for a numerical option of torch "
            "(torch.backends.cuda.matmul.allow_tf32) or another build of it"
        )
    log.info("self-test: %s", report)
    return report


@dataclass(frozen=True)
class _Case:
    hidden: torch.Tensor  # [N, H]
    weight: torch.Tensor  # [V_local, H]
    targets: torch.Tensor  # [N] int64
    upstream: torch.Tensor  # [2, N] fp32, of log-prob and entropy; [3, N] with the KL
    ref_hidden: torch.Tensor | None  # [N, H]; the reference's weight is the policy's
    group: dist.ProcessGroup | None
    temperature: float
    vocab_size: int
    soft_cap: float | None

    @property
    def options(self) -> dict:
        scales = {"temperature": self.temperature, "vocab_size": self.vocab_size, "soft_cap": self.soft_cap}
        return {"group": self.group, **scales}

    @property
    def reference(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.ref_hidden is None else (self.ref_hidden, self.weight)

    @property
    def values(self) -> tuple[str, ...]:
        return ("log-prob", "entropy", "KL")[: len(self.upstream)]


def _case(hidden_size, vocab_size, rows_local, dtype, group, device, with_kl, temperature, soft_cap) -> _Case:
    first, _ = own_columns(rows_local, group, vocab_size)
    draw = torch.Generator().manual_seed(0)
    hidden, noise = torch.randn(2, NUM_TOKENS, hidden_size, generator=draw)
    upstream = torch.randn(3, NUM_TOKENS, generator=draw)
    table = torch.randn(_TABLE_ROWS, hidden_size, generator=draw) * (temperature / hidden_size**0.5)
    ids = first + torch.arange(rows_local, device=device)
    scale = 0.5 + (ids // _TABLE_ROWS) / (1 + vocab_size // _TABLE_ROWS)
    weight = table.to(device, dtype)[ids % _TABLE_ROWS].mul_(scale.to(dtype)[:, None])
    targets = _targets(vocab_size, device)
    ref_hidden = (hidden + noise).to(device, dtype) if with_kl else None
    upstream = upstream[: 3 if with_kl else 2].to(device)
    hidden = hidden.to(device, dtype)
    return _Case(hidden, weight, targets, upstream, ref_hidden, group, temperature, vocab_size, soft_cap)


def _targets(vocab_size: int, device: torch.device) -> torch.Tensor:
    targets = torch.linspace(0, vocab_size - 1, NUM_TOKENS, device=device).round_().long()
    targets[IGNORED] = -100
    return targets


def _slice(case: _Case) -> _Case:
    """The case with the first rows of every rank's weight, as many as WEIGHT_ELEMENTS holds, and as much padding."""
    num_rows, hidden_size = case.weight.shape
    device = case.weight.device
    kept = min(num_rows, max(1, WEIGHT_ELEMENTS.get(device.type, WEIGHT_ELEMENTS["cuda"]) // hidden_size))
    if kept == num_rows:
        return case
    ranks = 1 if case.group is None else dist.get_world_size(case.group)
    vocab_size = max(1, case.vocab_size - ranks * (num_rows - kept))
    changes = {"weight": case.weight[:kept], "vocab_size": vocab_size, "targets": _targets(vocab_size, device)}
    return replace(case, **changes)


def _raised(case: _Case, fused: bool) -> str | None:
    """What this rank's kernels raise, launched without a collective, in which the others would wait for ever."""
    columns = (case.temperature, case.soft_cap, *own_columns(len(case.weight), case.group, case.vocab_size))
    logits, targets, upstream = case.hidden @ case.weight.T, case.targets, case.upstream
    try:
        if case.ref_hidden is None:
            packed = logprob.local_statistics(logits, targets, *columns)
            maximum, log_sum, _, entropy = logprob.merge_statistics(packed[None], targets, case.temperature)
            logprob.backward_into(logits, logits, targets, maximum, log_sum, entropy, *upstream, *columns)
        else:
            ref_logits = case.ref_hidden @ case.weight.T
            packed = logprob_kl.local_statistics(logits, ref_logits, targets, *columns)
            merged, _ = logprob_kl.merge(packed[None], targets, case.temperature)
            logprob_kl.backward_into(logits, logits, ref_logits, targets, merged, upstream, *columns)
        if fused:
            weight = _slice(case).weight
            out, grad_logits = torch.zeros_like(weight, dtype=torch.float32), logits[:, : len(weight)].contiguous()
            linear_logprob.add_weight_gradient(out, grad_logits, case.hidden)
    except Exception as error:  # whatever a launch or a compiler finds: the reference does without them
        return f"{type(error).__name__}: {error}"
    return None


def _agreed(values: list[float], case: _Case) -> list[float]:
    """The largest of each over the group, infinite where somebody has a NaN."""
    values = torch.tensor(values, dtype=torch.float64, device=case.weight.device).nan_to_num_(nan=torch.inf)
    if case.group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=case.group)
    return values.tolist()


def _report(case: _Case, fused: bool, given_up: str | None) -> Report:
    errors = _errors_of_logits(case) | (_errors_from_hidden(_slice(case)) if fused else {})
    allowed = OF_LOGITS[case.weight.dtype] | FROM_HIDDEN[case.weight.dtype]
    op = "linear_loss" if fused else "logprob_and_entropy" if case.ref_hidden is None else "logprob_entropy_and_kl"
    path = dispatch.path(case.weight.device, case.weight.dtype).name
    errors = dict(zip(errors, _agreed([*errors.values()], case), strict=True))
    return Report(op, path, errors, {name: allowed[name] for name in errors}, given_up)


def _worst(report: Report) -> str:
    name = max(report.errors, key=lambda name: report.errors[name] / report.tolerances[name])
    return (
        f"{report.op} by {report.path} is not fp64's: its {name} is wrong by up to {report.errors[name]:.1e}, allowed "
        f"are {report.tolerances[name]:.0e}"
    )


def _remedy() -> str:
    return (
        "The run goes on, slower. Install megarl again on this machine (TORCH_CUDA_ARCH_LIST names its GPU), with "
        "another compiler, Triton or driver where that does not help"
    )


def _errors_from_hidden(case: _Case) -> dict[str, float]:
    """linear_loss: values, dhidden and dweight."""

    def token_loss(logprob, entropy, places, *kl):
        return sum(slope[places] * value for slope, value in zip(case.upstream, (logprob, entropy, *kl)))

    hidden, weight = case.hidden.clone().requires_grad_(), torch.nn.Parameter(case.weight)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    loss, *found = linear_loss(hidden, weight, case.targets, token_loss, reference=case.reference, **case.options)
    loss.backward()

    exact_hidden = case.hidden.double()
    ref_logits = None if case.ref_hidden is None else _logits(case.ref_hidden.double(), case.weight)
    exact, of_logits, sizes = _definition(_logits(exact_hidden, case.weight), ref_logits, case)
    of_hidden = torch.zeros_like(exact_hidden)
    for rows, tile in _tiles(case.weight):
        of_hidden.addmm_(of_logits[:, rows], tile)
    if case.group is not None:
        dist.all_reduce(of_hidden, group=case.group)
    # A sum over the tokens, of fp64 gradients: fp32 adds no error to it that a tolerance would notice.
    difference = weight.main_grad.addmm_(of_logits.T.float(), case.hidden.float(), alpha=-1).norm(dim=-1)
    size = (sizes * exact_hidden.norm(dim=-1, keepdim=True)).norm(dim=0)
    of_weight = difference / (size + _UNDERFLOW[weight.dtype] * exact_hidden.norm())
    of_hidden = (hidden.grad.double() - of_hidden).norm(dim=-1) / (of_hidden.norm(dim=-1) + _UNDERFLOW[weight.dtype])
    of_gradients = {"dhidden": of_hidden.max().item(), "dweight": of_weight.max().item()}
    return _errors_of_values(found, exact, case) | of_gradients


def _tiles(weight: torch.Tensor):
    """(rows, these rows in fp64), in a buffer that the next tile overwrites."""
    buffer = torch.empty((min(_TILE, len(weight)), weight.shape[1]), dtype=torch.float64, device=weight.device)
    for start in range(0, len(weight), _TILE):
        tile = weight[start : start + _TILE]
        yield slice(start, start + len(tile)), buffer[: len(tile)].copy_(tile)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = hidden.new_empty((len(hidden), len(weight)))
    for rows, tile in _tiles(weight):
        logits[:, rows] = hidden @ tile.T
    return logits


def _errors_of_logits(case: _Case) -> dict[str, float]:
    """logprob_and_entropy or logprob_entropy_and_kl: values and dlogits."""
    logits = (case.hidden @ case.weight.T).requires_grad_()
    if case.ref_hidden is None:
        ref_logits, found = None, logprob_and_entropy(logits, case.targets, **case.options)
    else:
        ref_logits = (case.ref_hidden @ case.weight.T).double()
        found = logprob_entropy_and_kl(logits, case.reference, case.targets, **case.options)
    sum((slope * value).sum() for slope, value in zip(case.upstream, found)).backward()
    exact, of_logits, sizes = _definition(logits.detach().double(), ref_logits, case)
    difference = (logits.grad.double() - of_logits).norm(dim=0)
    of_logits = difference / (sizes.norm(dim=0) + _UNDERFLOW[logits.dtype])
    values = {f"{name} of logits": error for name, error in _errors_of_values(found, exact, case).items()}
    return values | {"dlogits": of_logits.max().item()}


def _definition(logits: torch.Tensor, ref_logits: torch.Tensor | None, case: _Case):
    """((log-prob, entropy, any KL), each [N], dlogits [N, V_local], the size of its terms [N, V_local]), in fp64."""

    def of_all(own: torch.Tensor) -> torch.Tensor:
        return _all_gather(own.contiguous(), case.group).movedim(0, 1).flatten(1)[:, : case.vocab_size]

    def log_softmax(x: torch.Tensor) -> torch.Tensor:
        capped = x if case.soft_cap is None else case.soft_cap * torch.tanh(x / case.soft_cap)
        return torch.log_softmax(capped / case.temperature, dim=-1)

    x = of_all(logits).requires_grad_()
    log_p, kept = log_softmax(x), case.targets >= 0
    values = [log_p.gather(1, case.targets.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)]
    if ref_logits is not None:
        values.append((log_p.exp() * (log_p - log_softmax(of_all(ref_logits)))).sum(dim=-1))
    values = [value * kept for value in values]
    (gradient,) = torch.autograd.grad(sum((slope * value).sum() for slope, value in zip(case.upstream, values)), x)
    terms = case.upstream.abs().sum(dim=0) * kept / case.temperature
    size = gradient.abs() + log_p.detach().exp() * terms[:, None]
    first, num_valid = own_columns(logits.shape[1], case.group, case.vocab_size)
    own = torch.zeros((2, *logits.shape), dtype=torch.float64, device=logits.device)
    own[:, :, :num_valid] = torch.stack([gradient, size])[:, :, first : first + num_valid]
    return [value.detach() for value in values], *own


def _errors_of_values(found, exact, case: _Case) -> dict[str, float]:
    errors = {name: (f.detach() - e).abs().max() for name, f, e in zip(case.values, found, exact)}
    if case.ref_hidden is not None:
        errors["KL"] = errors["KL"] / exact[2].max()
    return {name: error.item() for name, error in errors.items()}
