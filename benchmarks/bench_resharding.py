"""Weights from Megatron layouts into vLLM layouts: planned, gathered, and what others do.

    python benchmarks/bench_resharding.py [--quick] [--peers] [--out FILE]

Simulated: paper-size layouts of published recipes, no weights; bytes are exact, planning seconds are one rank's.
Measured: real transfers over gloo on this machine. `--peers` adds mbridge, in a virtual environment made for it under
runs/. Without `--out` (and without `--quick`) the results go to benchmarks/results/<machine>/. `--out` writes JSON:
`conditions`, and `results`, a list with for each case and design

    case, design, kind          which; design "planned" | "gathered" | "megatron" | "mbridge", kind "simulated" | "measured"
    ingress_bytes_max           what the busiest destination takes; beside it ingress_lower_bound, what it holds
    egress_bytes_max, _mean     of a trainer rank
    peak_extra_bytes            of any process, besides its weights
    fallback_bytes              that no plan could place
    planning_seconds            CPU seconds of one rank, once for a pair of layouts
    seconds                     wall time of one transfer, the median

and null where a figure does not apply.
"""  # noqa: E501

import json
import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated

import torch
import typer
from logprob_measured import processor
from resharding_measured import BUCKET_BYTES as MEASURED_BUCKET_BYTES
from resharding_measured import measure
from resharding_simulated import BUCKET_BYTES, CASES, QUICK, simulate
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "runs" / "bench-resharding-peers"
MBRIDGE = "mbridge==0.15.1"
COLORS = {"planned": "#1f6f8b", "gathered": "#c96a3b", "mbridge": "#8a8a8a", "megatron": "#6a994e"}


def main(
    quick: Annotated[bool, typer.Option(help="Fewer and smaller cases, well under a minute.")] = False,
    peers: Annotated[bool, typer.Option(help="Measure mbridge too, in an environment of its own.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file, a plot beside it.")] = None,
) -> None:
    if peers and Path(sys.prefix) != PEERS:
        arguments = [argument for argument in sys.argv if argument]
        raise typer.Exit(subprocess.run([make_peers_environment(), *arguments], check=False).returncode)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load_before = os.getloadavg()[0]
    results = [r for case in (QUICK if quick else CASES) for r in simulate(case, repetitions=1 if quick else 3)]
    results += measure(quick, with_mbridge=peers)
    conditions = {
        "processor": processor(), "python": platform.python_version(), "torch": torch.__version__, "quick": quick,
        "bucket_bytes_simulated": BUCKET_BYTES, "bucket_bytes_measured": MEASURED_BUCKET_BYTES,
        "peers": MBRIDGE if peers else None, "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
    }  # fmt: skip
    show(results, conditions)
    if out is None and not quick:
        out = ROOT / "benchmarks" / "results" / machine() / "resharding.json"
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n")
        plot(results, out.with_suffix(".png"))


def make_peers_environment() -> Path:
    """An interpreter that sees this one's packages and mbridge besides; nothing is installed into this one's."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        venv.create(PEERS, with_pip=True)
        (site,) = PEERS.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        # Read as a .pth, so that the editable install among our packages is found too.
        (site / "megarl.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", MBRIDGE], check=True)
    return python


def machine() -> str:
    return re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")


def show(results: list[dict], conditions: dict) -> None:
    console = Console(width=170)
    for kind in ("simulated", "measured"):
        table = Table(title=f"{kind}: GB of bf16 weights")
        for heading in ("case", "design"):
            table.add_column(heading)
        for heading in ("ingress max", "x bound", "egress max", "mean", "extra MiB", "transfers", "planning s", "s"):
            table.add_column(heading, justify="right")
        for r in (r for r in results if r["kind"] == kind):
            table.add_row(
                r["case"], r["design"],
                f"{r['ingress_bytes_max'] / 1e9:.2f}", f"{r['ingress_over_bound']:.2f}",
                f"{r['egress_bytes_max'] / 1e9:.2f}", f"{r['egress_bytes_mean'] / 1e9:.2f}",
                f"{r['peak_extra_bytes'] / 2**20:.0f}",
                *("-" if r[key] is None else f"{r[key]:{form}}"
                  for key, form in (("transfers", ",d"), ("planning_seconds", ".3f"), ("seconds", ".3f"))),
            )  # fmt: skip
        console.print(table)
    console.print(
        f"{conditions['processor']}, torch {conditions['torch']}; load average {conditions['load_average_before']:.1f} "
        f"before, {conditions['load_average_after']:.1f} after: compare times only where both are low"
    )


def plot(results: list[dict], path: Path) -> None:
    """Ingress and egress of the simulated cases, seconds of the measured ones; bars, bytes on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    simulated = [r for r in results if r["kind"] == "simulated"]
    measured = [r for r in results if r["kind"] == "measured"]
    figure, (ingress, egress, seconds) = pyplot.subplots(
        1, 3, figsize=(17, 6.5), width_ratios=[3, 3, 2], layout="constrained"
    )
    cases = list(dict.fromkeys(r["case"] for r in simulated))
    for axis, key, title in (
        (ingress, "ingress_bytes_max", "busiest engine rank takes"),
        (egress, "egress_bytes_max", "busiest trainer rank sends, all replicas"),
    ):
        for shift, design in ((-0.2, "planned"), (0.2, "gathered")):
            values = {r["case"]: r[key] / 1e9 for r in simulated if r["design"] == design}
            axis.barh(
                [i + shift for i in range(len(cases))], [values[c] for c in cases], 0.4, label=design,
                color=COLORS[design],
            )  # fmt: skip
        axis.set(xscale="log", xlim=(0.5, None), xlabel="GB (simulated, bf16)", title=title)
        axis.set_ylim(len(cases) - 0.4, -0.6)
    bound = {r["case"]: r["ingress_lower_bound"] / 1e9 for r in simulated}
    ingress.plot([bound[c] for c in cases], range(len(cases)), "k|", markersize=14, label="lower bound")
    ingress.set_yticks(range(len(cases)), [c.replace(": ", "\n", 1) for c in cases], fontsize=7)
    egress.set_yticks([])
    ingress.legend()
    labels = [f"{r['case'].split(',')[0]}: {r['design']}" for r in measured]
    seconds.barh(labels, [r["seconds"] for r in measured], color=[COLORS[r["design"]] for r in measured])
    seconds.invert_yaxis()
    seconds.set(xlabel="seconds (measured, median)", title="one transfer, gloo, one machine")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
