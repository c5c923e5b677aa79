"""Where metrics go: a file, TensorBoard, wandb, and the terminal."""

import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from megarl.errors import MegarlError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LOG_FILE_WIDTH = 120  # columns of tables where the output is no terminal
# (label, metric, format) in the order shown; of two metrics with one label the first that the step has is shown
SHOWN = (
    ("reward", "objective/scores", ".3f"),
    ("loss", "loss", ".4f"),
    ("length", "response_length/mean", ".1f"),
    ("entropy", "policy/entropy_avg", ".3f"),
    ("kl", "objective/kl", ".2e"),
    ("approx kl", "policy/approxkl_avg", ".2e"),
    ("tokens/s", "throughput/tokens_per_second", ",.0f"),
)


class JsonlLogger:
    """One JSON object a line in metrics.jsonl, written through at once: a run that dies leaves every step it made. Rows
    of tables stand in samples.jsonl.

    A value that is not finite becomes null, for JSON has no NaN, and its key is listed under "not_finite".
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._file = open(run_dir / METRICS_FILE, "a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        not_finite = [name for name, value in metrics.items() if not math.isfinite(value)]
        line = {"step": step} | {name: None if name in not_finite else _number(v) for name, v in metrics.items()}
        if not_finite:
            line["not_finite"] = not_finite
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        with open(self._run_dir / SAMPLES_FILE, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step} | row) + "\n" for row in rows)

    def close(self) -> None:
        self._file.close()


class TensorboardLogger:
    """Scalars as TensorBoard events in <run_dir>/tensorboard."""

    def __init__(self, run_dir: Path):
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A wandb run with its files in <run_dir>/wandb; offline when there is no key (`wandb sync` sends it later)."""

    def __init__(self, run_dir: Path, config: dict[str, Any], project: str, experiment: str):
        _require("wandb")
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=project,
            name=experiment,
            dir=str(run_dir),
            config=config,
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Training and held-out numbers of one step come in two calls; wandb merges them as long as the step stays.
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """Sends every step's metrics to each of `names` (trainer.logger), in the order given.

    Args:
        names: of "jsonl", "tensorboard", "wandb" and "console". The console is served by `ProgressBar`, not from here.
        run_dir: where the loggers put their files; must exist.
        config: the resolved configuration, for wandb.
        project, experiment: wandb's names; experiment defaults to the name of run_dir.

    Raises:
        ValueError: an unknown name.
        MegarlError: a logger's package is not installed.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, config: dict[str, Any], project: str, experiment: str | None = None
    ):
        run_dir = Path(run_dir)
        makers = {
            "jsonl": lambda: JsonlLogger(run_dir),
            "tensorboard": lambda: TensorboardLogger(run_dir),
            "wandb": lambda: WandbLogger(run_dir, config, project, experiment or run_dir.resolve().name),
        }
        unknown = [name for name in names if name not in makers and name != "console"]
        if unknown:
            raise ValueError(f"unknown logger {unknown[0]!r} in trainer.logger; known: console, {', '.join(makers)}")
        self._loggers = [makers[name]() for name in dict.fromkeys(names) if name != "console"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step` everywhere. Steps must not decrease; one step may be logged in several parts."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the rows of a table, at least one, all with the same keys, everywhere; in files under "samples"."""
        for logger in self._loggers:
            logger.table(step, rows)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


class ProgressBar:
    """A run's progress on the terminal: a live bar there, plain lines in a log file, nothing when quiet.

    Args:
        total_steps: steps of the whole run.
        quiet: print nothing at all.
        console: where to print. Default: standard output.
        seconds_between_lines: where there is no terminal, a step that ends sooner after the last line gets none
            of its own; the first and the last step always do.

    Attributes:
        console: prints above the bar without disturbing it; silent when quiet.
    """

    def __init__(
        self, total_steps: int, quiet: bool, console: Console | None = None, seconds_between_lines: float = 0.5
    ):
        self._total_steps = total_steps
        self._seconds_between_lines = seconds_between_lines
        self._last_line = -math.inf
        self.console = Console(quiet=True) if quiet else console or _standard_output()
        self._bar = None
        if self.console.is_terminal and not quiet:
            self._bar = _LiveBar(total_steps, self.console)
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is done: the metrics of SHOWN that it has, its time, and the time of each phase."""
        if self._bar:
            self._bar.show(step, step_numbers(metrics), step_phases(metrics))
            return
        now = time.monotonic()
        if now - self._last_line >= self._seconds_between_lines or step == self._total_steps:
            self._last_line = now
            counted = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
            self.note("  ".join(part for part in (counted, step_numbers(metrics), step_phases(metrics)) if part))

    def note(self, line: str) -> None:
        """One line of text, above the bar."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back. May be called twice."""
        if self._bar:
            self._bar.stop()


class _LiveBar(Progress):
    """Rich's progress bar, with the step's numbers and phase times on lines of their own below."""

    def __init__(self, total_steps: int, console: Console):
        self._below: list[Text] = []
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task_id = self.add_task("step", total=total_steps)

    def get_renderables(self):
        yield from super().get_renderables()
        yield from self._below

    def show(self, step: int, numbers: str, phases: str) -> None:
        self._below = [Text(line, style=style) for line, style in ((numbers, "bold"), (phases, "dim")) if line]
        self.update(self._task_id, completed=step)


def step_numbers(metrics: Mapping[str, float]) -> str:
    """The metrics of SHOWN as text: "reward 0.412  length 5.0  entropy 0.310  approx kl 1.2e-03  tokens/s 2,950"."""
    parts = [f"{label} {metrics[name]:{style}}" for label, name, style in SHOWN if name in metrics]
    return "  ".join(parts)


def step_phases(metrics: Mapping[str, float]) -> str:
    """The time of a step and of its phases as text: "0.71 s (generate 0.30, update 0.25, sync 0.06)"."""
    phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    total = phases.pop("total", sum(phases.values()))
    parts = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
    return f"{total:.2f} s ({parts})" if parts else ""


def _standard_output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=LOG_FILE_WIDTH)


def _number(value: float) -> float | int:
    return value if isinstance(value, int) else float(value)


def _require(package: str) -> None:
    # A mere folder named "wandb" in the working directory has a spec too, but one without an origin.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MegarlError(
            f"trainer.logger lists {package}, which is not installed: pip install {package}, or take it off the list"
        )


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").removeprefix("https://").removeprefix("http://")
    return netrc.is_file() and host.rstrip("/") in netrc.read_text()
