"""How bench_logprob.py and bench_linear_logprob.py measure: the arms take turns, on one clock, in one process.

On a CPU the clock is CPU-seconds of one thread, which other processes disturb less than wall time, and extra memory is
the peak resident size over the one before the call. On a GPU it is triton's do_bench and the peak allocation. Every
size has a plain copy of the logits' bytes and a matrix product beside it. Gradient buffers exist before a call.
"""

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

FORWARD, BOTH, LOGPROB = "forward", "forward+backward", "log-prob only, both"
KL_FORWARD, KL_BOTH = "forward, exact KL", "forward+backward, exact KL"
ERROR_TOKENS = 256
ROUNDS = 3
ERRORS = ("error_logprob", "error_entropy", "error_kl")


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    vocab: int
    dtype: str


@dataclass(frozen=True)
class Arm:
    """One contender at one size."""

    values: Callable[[bool], tuple[torch.Tensor | None, ...]]  # with entropy? -> (log-prob, entropy, any KL) or ()
    step: Callable[[bool], None]  # with entropy? forward and backward
    has_entropy: bool = True
    has_forward: bool = True  # False: its forward alone is another arm's


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    size: Size,
    arms: dict[str, Arm],
    exact: tuple[torch.Tensor, ...],
    modes: tuple[str, ...] = (FORWARD, BOTH, LOGPROB),
    zero_gradients: Callable[[], object] = lambda: None,
) -> list[dict]:
    """One row per arm and mode.

    exact: log-prob, entropy and any KL of the first ERROR_TOKENS in fp64.
    zero_gradients: called before every timed call, outside its time. Buffers that only one arm writes would else have
        lain untouched while the others ran, and some systems take such pages back.
    """
    clock, seconds_of = ("triton.do_bench", gpu_seconds) if device().type == "cuda" else ("CPU seconds", cpu_seconds)
    rows = []
    errors = {name: errors_of(arm, exact) for name, arm in arms.items()}
    for mode in modes:
        calls = {name: call(arm, mode) for name, arm in arms.items() if runs(arm, mode)}
        extra = {name: peak_extra_mib(run) for name, run in calls.items()}
        seconds = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, run in calls.items():
                zero_gradients()
                seconds[name].append(seconds_of(run))
        for name in calls:
            seen = f"T {size.tokens}, {mode}, {name}: {statistics.median(seconds[name]):.3f} s"
            print(seen, file=sys.stderr, flush=True)
            of_logprob, of_entropy, of_kl = errors[name]
            rows.append(
                {
                    "peer": name, "tokens": size.tokens, "hidden": size.hidden, "vocab": size.vocab,
                    "dtype": size.dtype, "mode": mode, "seconds": statistics.median(seconds[name]),
                    "fastest": min(seconds[name]), "clock": clock, "extra_mib": extra[name],
                    "error_logprob": of_logprob, "error_entropy": of_entropy, "error_kl": of_kl,
                }
            )  # fmt: skip
    return rows


def runs(arm: Arm, mode: str) -> bool:
    return mode == LOGPROB or (arm.has_entropy and (mode in (BOTH, KL_BOTH) or arm.has_forward))


def call(arm: Arm, mode: str) -> Callable[[], object]:
    if mode in (FORWARD, KL_FORWARD):
        return torch.no_grad()(lambda: arm.values(True))
    return lambda: arm.step(mode != LOGPROB)


@torch.no_grad()
def errors_of(arm: Arm, exact: tuple[torch.Tensor, ...]) -> list[float | None]:
    """Of log-prob, entropy and KL; None for what the arm does not compute."""
    errors = [None, None, None]
    for place, (found, expected) in enumerate(zip(arm.values(True), exact)):
        if found is not None:
            errors[place] = (found.flatten()[:ERROR_TOKENS].double() - expected).abs().max().item()
    return errors


def exact_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of the first ERROR_TOKENS in fp64, the weight converted a tile at a time."""
    few = hidden[:ERROR_TOKENS].detach().double()
    return torch.cat([few @ tile.double().T for tile in weight.detach().split(8192)], dim=1)


def exact_values(
    logits: torch.Tensor, targets: torch.Tensor, ref_logits: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Log-prob, entropy and with a reference KL(policy || reference) of the first ERROR_TOKENS, in fp64."""
    log_p = torch.log_softmax(logits[:ERROR_TOKENS].detach().double(), dim=-1)
    logprob, entropy = log_p.gather(1, targets[:ERROR_TOKENS, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
    if ref_logits is None:
        return logprob, entropy
    log_q = torch.log_softmax(ref_logits[:ERROR_TOKENS].detach().double(), dim=-1)
    return logprob, entropy, (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def cpu_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def gpu_seconds(call: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=100, return_mode="median") / 1e3


def peak_extra_mib(call: Callable[[], None]) -> float:
    """Peak MiB during the call, once warm, over those before it. On a CPU: Linux with glibc only."""
    call()
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # freed heap that stays resident would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present VmRSS
    before = resident_mib("VmRSS")
    call()
    return resident_mib("VmHWM") - before


def resident_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {key}")


def yardsticks(size: Size) -> list[dict]:
    """What the machine does at this size without any arithmetic of ours: a copy of the logits' bytes, one GEMM unit."""
    dtype, on_gpu = getattr(torch, size.dtype), device().type == "cuda"
    hidden = torch.randn(size.tokens, size.hidden).to(device(), dtype)
    weight = torch.randn(size.vocab, size.hidden).to(device(), dtype)
    logits = hidden @ weight.T
    target = torch.empty_like(logits)
    calls = {"copy": lambda: target.copy_(logits), "matmul": lambda: torch.mm(hidden, weight.T, out=target)}
    work = {"copy": 2 * logits.nbytes, "matmul": 2 * size.tokens * size.hidden * size.vocab}
    common = {"tokens": size.tokens, "hidden": size.hidden, "vocab": size.vocab, "dtype": size.dtype}
    common |= {"mode": "yardstick", "extra_mib": None, **dict.fromkeys(ERRORS)}
    rows = []
    for name, call in calls.items():
        call()
        measured = [gpu_seconds(call)] if on_gpu else [cpu_seconds(call) for _ in range(ROUNDS)]
        seconds = statistics.median(measured)
        clock = "triton.do_bench" if on_gpu else "CPU seconds"
        per_second = work[name] / seconds
        rows.append({"peer": name, **common, "clock": clock, "seconds": seconds, "per_second": per_second})
        unit = "GB/s" if name == "copy" else "GFLOP/s"
        print(f"T {size.tokens}, {name}: {seconds:.3f} s, {per_second / 1e9:.0f} {unit}", file=sys.stderr, flush=True)
    return rows


def save(results: list[dict], missing: dict[str, str], load_before: float, out: Path | None) -> dict:
    """Write what there is to the JSON file, if one is wanted; the conditions."""
    conditions = {
        "machine": torch.cuda.get_device_name() if device().type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
        "load_average_before": load_before, "load_average_after": os.getloadavg()[0], "not_run": missing,
    }  # fmt: skip
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"conditions": conditions, "results": results}, indent=2) + "\n")
    return conditions


def report(title: str, results: list[dict], missing: dict[str, str], load_before: float, out: Path | None) -> None:
    """A table; with `out` also a JSON file, and a plot beside it."""
    conditions = save(results, missing, load_before, out)
    table = Table(title=title)
    headings = "peer|tokens|hidden|vocab|dtype|mode|seconds|fastest|extra MiB|error log-prob|error entropy|error KL"
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading in ("peer", "mode") else "right")
    for row in results:
        shown = [
            "" if row.get(key) is None else f"{row[key]:{form}}"
            for key, form in (("seconds", ".4f"), ("fastest", ".4f"), ("extra_mib", ".0f"))
        ]
        errors = ["" if row.get(key) is None else f"{row[key]:.1e}" for key in ERRORS]
        table.add_row(
            *(str(row[key]) for key in ("peer", "tokens", "hidden", "vocab", "dtype", "mode")), *shown, *errors
        )
    console = Console(width=170)
    console.print(table)
    for name, why in missing.items():
        console.print(f"{name} was not run: {why}")
    console.print(
        f"{conditions['machine']}, torch {torch.__version__}; load average {load_before:.1f} before, "
        f"{conditions['load_average_after']:.1f} after: compare with other runs only where both are low"
    )
    if out:
        plot(title, results, out.with_suffix(".png"))


def plot(title: str, results: list[dict], file: Path) -> None:
    """Forward and backward with entropy: a group of bars per size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results if row["mode"] == BOTH]
    sizes = list(dict.fromkeys((row["tokens"], row["hidden"], row["vocab"], row["dtype"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), squeeze=False)
    for axis, size in zip(axes[0], sizes):
        own = [row for row in rows if (row["tokens"], row["hidden"], row["vocab"], row["dtype"]) == size]
        own.sort(key=lambda row: -row["seconds"])
        colors = ["tab:orange" if row["peer"].startswith("megarl") else "tab:gray" for row in own]
        axis.barh([row["peer"] for row in own], [row["seconds"] for row in own], color=colors)
        axis.set_title("T {} H {} V {} {}".format(*size), fontsize=9)
        axis.set_xlabel(f"{own[0]['clock']}, {BOTH}")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x {len(names)}"
