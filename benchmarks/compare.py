"""Algorithms side by side on the arithmetic task from one warm start, and the chain SFT -> reward model -> PPO.

    python benchmarks/compare.py                      after `make warm-start`; `make compare` does both
    python benchmarks/compare.py --only ppo grpo --overrides trainer.total_steps=8

Writes runs/compare/summary.json, table.md and compare.png. Exits with 1 where an algorithm misses its threshold, or the
models' memory is not in the order PPO > OnlineDPO > GRPO.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from megarl.observability.plots import read_metrics, running_mean, series

ROOT = Path(__file__).parents[1]
OUT = Path("runs/compare")
# Held-out accuracy, sampled at temperature 1, that each must reach. The chain, whose reward never sees it, must raise
# it by CHAIN_RISE: over four standard errors of a difference between two samples of 1,000 answers.
THRESHOLDS = {
    "ppo": 0.80,
    "grpo": 0.80,
    "rloo": 0.80,
    "reinforce_plus_plus": 0.80,
    "online_dpo": 0.70,
    "rlhf": None,
}
CHAIN_RISE = 0.10
MEMORY_ORDER = ("ppo", "online_dpo", "grpo")
FIELDS = (
    "heldout_sampled_before",
    "heldout_sampled_after",
    "steps",
    "seconds",
    "peak_rss_mib",
    "peak_model_state_mib",
)


def run(name: str, overrides: list[str]) -> dict:
    """Train one algorithm; what its summary says."""
    if name == "rlhf":
        megarl("reward-model", "reward_model", [])
    megarl("train", name, overrides)
    summary = json.loads((OUT / name / "summary.json").read_text())
    config = yaml.safe_load((OUT / name / "config.yaml").read_text())
    tp, world = config["parallel"]["tensor_model_parallel_size"], config["trainer"]["n_gpus_per_node"]
    found = {field: summary.get({"seconds": "seconds_in_all"}.get(field, field)) for field in FIELDS}
    return found | {
        "model_state_mib": summary["model_state_mib"],
        "layout": f"tensor parallel {tp} x data parallel {world // tp}, {config['actor']['model']['dtype']}",
        "seed": summary["seed"],
    }


def megarl(command: str, name: str, overrides: list[str]) -> None:
    print(f"--- {name}", flush=True)
    config = ROOT / "configs" / f"arithmetic_{name}.yaml"
    subprocess.run([sys.executable, "-m", "megarl", command, str(config), *overrides], check=True)


def failures(found: dict[str, dict]) -> list[str]:
    """What was promised and is not so."""
    told = []
    for name, one in found.items():
        before, after, wanted = one["heldout_sampled_before"], one["heldout_sampled_after"], THRESHOLDS[name]
        if wanted is None and before is not None:
            wanted = round(before + CHAIN_RISE, 4)
        if wanted is None or after is None or after < wanted:
            told.append(f"{name}: held-out sampled accuracy {after}, wanted at least {wanted}")
    sizes = [(name, found[name]["peak_model_state_mib"]) for name in MEMORY_ORDER if name in found]
    if any(larger[1] <= smaller[1] for larger, smaller in zip(sizes, sizes[1:], strict=False)):
        told.append(f"the models' memory should fall in this order: {sizes}")
    return told


def table(found: dict[str, dict]) -> str:
    """Markdown."""
    rows = [
        "| algorithm | held-out sampled, before | after | steps | seconds | models, MiB | weights | gradients "
        "| optimizer | activations | process, MiB |",
        "|" + "---|" * 11,
    ]
    for name, one in found.items():
        parts = [f"{one['model_state_mib'][part]:.2f}" for part in ("weights", "gradients", "optimizer", "activations")]
        accuracies = [_text(one[f"heldout_sampled_{when}"], ".3f") for when in ("before", "after")]
        cells = [name, *accuracies, one["steps"], f"{one['seconds']:.0f}", f"{one['peak_model_state_mib']:.2f}", *parts]
        rows.append("| " + " | ".join(map(str, [*cells, f"{one['peak_rss_mib']:.0f}"])) + " |")
    layouts = sorted({one["layout"] for one in found.values()})
    return "\n".join([*rows, "", f"Memory of rank 0 during an update; layout: {'; '.join(layouts)}."]) + "\n"


def _text(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def plot(names: list[str], path: Path) -> None:
    """The share of right answers among the completions of each step."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name in names:
        lines = read_metrics(OUT / name)
        # The rule's own word, whatever the algorithm learns from.
        steps, accuracy = series(lines, "reward/arithmetic/acc")
        axes.plot(steps, running_mean(accuracy, 5), linewidth=1.5, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("share of right sampled answers, training")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=THRESHOLDS, default=list(THRESHOLDS), help="which (default: all)")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value for each run, such as trainer.seed=1")
    arguments = parser.parse_args()
    found = {name: run(name, arguments.overrides) for name in arguments.only}
    (OUT / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    (OUT / "table.md").write_text(table(found))
    plot(arguments.only, OUT / "compare.png")
    print(table(found))
    for line in failures(found):
        print(f"MISSED {line}")
    print(f"results in {OUT}: summary.json, table.md, compare.png")
    return 1 if failures(found) else 0


if __name__ == "__main__":
    sys.exit(main())
