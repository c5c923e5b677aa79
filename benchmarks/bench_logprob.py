"""Log-prob and entropy, forward and backward: the op of ops/logprob.py against log_softmax written out.

    python benchmarks/bench_logprob.py [--quick] [--out FILE]

Times are CPU-seconds of one thread (so other processes disturb them less than wall time), the arms taking turns in
every round; the median and the fastest round are reported. Extra memory is the peak resident size over the one before
the call, with the logits already there, the gradient included. Errors are against fp64, on the first tokens.
"""

import ctypes
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from megarl.ops.logprob import logprob_and_entropy

FULL = [(512, 151_936, "bfloat16"), (4096, 32_000, "bfloat16"), (16_384, 128, "float32")]
QUICK = [(128, 32_000, "bfloat16"), (4096, 128, "float32")]


def naive(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one writes without an op: an fp32 log_softmax of everything, and autograd."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


ARMS = {"naive log_softmax": naive, "megarl (reference)": logprob_and_entropy}


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes, a few seconds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures and the conditions to this JSON file.")] = None,
) -> None:
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = [row for size in (QUICK if quick else FULL) for row in measure(*size, rounds=3 if quick else 7)]
    conditions = {
        "processor": processor(), "threads": 1, "torch": torch.__version__, "python": platform.python_version(),
        "load_average_before": load_before, "load_average_after": os.getloadavg()[0], "quick": quick,
    }  # fmt: skip
    show(rows, conditions)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=2) + "\n")


def measure(num_tokens: int, vocab: int, dtype: str, rounds: int) -> list[dict]:
    """One row per arm for logits [num_tokens, vocab]."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_tokens, vocab, generator=generator) * 3).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    seconds = {arm: [] for arm in ARMS}
    extra_mib = {arm: peak_extra_mib(lambda f=f: forward_and_backward(f, logits, targets)) for arm, f in ARMS.items()}
    for _ in range(rounds):
        for arm, function in ARMS.items():
            start = time.process_time()
            forward_and_backward(function, logits, targets)
            seconds[arm].append(time.process_time() - start)
    return [
        {
            "tokens": num_tokens, "vocab": vocab, "dtype": dtype, "arm": arm,
            "cpu_seconds_median": statistics.median(seconds[arm]), "cpu_seconds_min": min(seconds[arm]),
            "peak_extra_mib": extra_mib[arm], "logits_mib": logits.nbytes / 2**20,
            **errors(function, logits.detach()[:16], targets[:16]),
        }
        for arm, function in ARMS.items()
    ]  # fmt: skip


def forward_and_backward(function, logits: torch.Tensor, targets: torch.Tensor) -> None:
    logprob, entropy = function(logits, targets)
    (logprob.sum() + entropy.sum()).backward()
    logits.grad = None


def errors(function, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    values = function(logits, targets)
    exact = naive_fp64(logits, targets)
    return {
        f"max_error_{name}": (a - b).abs().max().item() for name, a, b in zip(("logprob", "entropy"), values, exact)
    }


def naive_fp64(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double(), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def peak_extra_mib(call) -> float:
    """Peak resident MiB during the call, once warm, over those before it. Linux with glibc only."""
    call()
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


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x {len(names)}"


def show(rows: list[dict], conditions: dict) -> None:
    table = Table(title="log-prob and entropy, forward and backward, one thread")
    for heading in ("tokens", "vocab", "type", "arm"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for heading in ("CPU s (median)", "CPU s (min)", "extra MiB", "logits MiB", "error logprob", "error entropy"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]), str(row["vocab"]), row["dtype"], row["arm"],
            f"{row['cpu_seconds_median']:.3f}", f"{row['cpu_seconds_min']:.3f}",
            f"{row['peak_extra_mib']:.0f}", f"{row['logits_mib']:.0f}",
            f"{row['max_error_logprob']:.1e}", f"{row['max_error_entropy']:.1e}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    console.print(
        f"{conditions['processor']}, torch {conditions['torch']}; load average {conditions['load_average_before']:.1f} "
        f"before, {conditions['load_average_after']:.1f} after: compare with other runs only where both are low"
    )


if __name__ == "__main__":
    typer.run(main)
