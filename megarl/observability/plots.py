"""The picture of a run: training reward and held-out accuracy over steps."""

import json
from pathlib import Path

import numpy as np

from megarl.errors import MegarlError
from megarl.observability.loggers import METRICS_FILE

BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#d9730d", "#2a8f5c", "#6b7280"
HELDOUT = (
    ("heldout/sampled_accuracy", "held-out accuracy, sampled", ORANGE, "o"),
    ("heldout/greedy_accuracy", "held-out accuracy, greedy", GREEN, "s"),
)


def plot_run(run_dir: Path) -> Path:
    """Draw metrics.jsonl of `run_dir` into reward.png, or loss.png for a supervised run, and return its path.

    Thin line: every step. Thick line: the mean over the steps around (a tenth of the run, 51 at most). Points: accuracy
    on held-out prompts.

    Raises:
        MegarlError: run_dir holds no metrics.jsonl, or one without a reward and without a loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    lines = read_metrics(run_dir)
    rewards = series(lines, "objective/scores")
    losses = series(lines, "loss")
    heldout = [(series(lines, name), *style) for name, *style in HELDOUT]
    if not rewards[0].size and not losses[0].size:
        raise MegarlError(f"{run_dir / METRICS_FILE} holds neither objective/scores nor loss: there is nothing to plot")

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards[0].size:
        name, drawn = "reward", [_curve(axes, *rewards, "training reward"), *_points(axes, heldout)]
        axes.set_ylabel("reward, accuracy" if len(drawn) > 1 else "reward")
    else:
        name, drawn = "loss", [_curve(axes, *losses, "training loss")]
        axes.set_ylabel("loss per token (nats)")
        if any(steps.size for (steps, _), *_ in heldout):
            right = axes.twinx()
            drawn += _points(right, heldout)
            right.set_ylabel("accuracy")
            right.set_ylim(0, 1.04)
            right.spines["top"].set_visible(False)
    # Rewards and accuracies mostly lie in [0, 1]: then the whole range is shown, so that two runs compare at a glance.
    low, high = axes.get_ylim()
    if name == "reward" and rewards[1].min() >= 0 and rewards[1].max() <= 1:
        low, high = 0, 1.04
    axes.set_ylim(min(low, 0) if name == "loss" else low, high)
    axes.set_xlabel("step")
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(run_dir.resolve().name, loc="left", fontweight="bold")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=drawn, loc="outside lower center", ncols=len(drawn), frameon=False, fontsize=9)
    path = run_dir / f"{name}.png"
    figure.savefig(path)
    return path


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, in order.

    Raises:
        MegarlError: there is no such file.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise MegarlError(f"{path} does not exist: is {run_dir} a run folder, and was 'jsonl' in its trainer.logger?")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def series(lines: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) [K] float64 of metric `name`, where a line has it and it is finite."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return tuple(np.array(found, dtype=np.float64).reshape(-1, 2).T)


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """[K] -> [K], the mean of each value and up to `reach` neighbours on each side, as many left as right.

    Centred, so that the mean of a rising curve does not trail behind it.
    """
    sums = np.cumsum(np.concatenate([[0.0], values]))
    place = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(place, place[::-1]))
    return (sums[place + reaches + 1] - sums[place - reaches]) / (2 * reaches + 1)


def _curve(axes, steps: np.ndarray, values: np.ndarray, label: str):
    reach = min(len(values) // 20, 25)
    axes.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.35)
    (line,) = axes.plot(
        steps, running_mean(values, reach), color=BLUE, linewidth=2, label=f"{label} (mean of {2 * reach + 1} steps)"
    )
    return line


def _points(axes, heldout) -> list:
    drawn = []
    for (steps, values), label, colour, marker in heldout:
        if steps.size:
            look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1, "clip_on": False}
            drawn += axes.plot(steps, values, label=label, **look)
    return drawn
