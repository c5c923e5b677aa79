"""What a person sees of a run, and what it leaves behind. Rank 0 speaks; on other ranks every method does nothing."""

import json
import resource
import time
from pathlib import Path

import numpy as np

from megarl.config.explain import dump
from megarl.config.root import RewardModelTrainConfig, SFTConfig, TrainConfig
from megarl.observability.loggers import Loggers, ProgressBar
from megarl.observability.metrics import rollout_metrics
from megarl.observability.plots import plot_run
from megarl.observability.tables import sample_table
from megarl.types import Rollout

SAMPLE_ROWS = 6
RATIOS = (0.1, 2.0)  # a mean policy ratio outside of them says that the updates of a step go too far
OWN_FILES = ("metrics.jsonl", "config.yaml", "summary.json", "reward.png", "loss.png", "samples.jsonl")


class Reporter:
    """Progress, tables, metrics, plot and summary of one run, as a context manager.

    The summary is written when the run ends well; metrics are on disk after every step.
    """

    def __init__(
        self, config: TrainConfig | SFTConfig | RewardModelTrainConfig, run_dir: Path, speaks: bool, quiet: bool
    ):
        self.speaks = speaks
        self.quiet = quiet
        self.run_dir = run_dir
        self.config = config
        self.summary: dict = {"seed": config.trainer.seed}
        self.seconds: list[dict[str, float]] = []
        self.parity: list[float] = []
        self.rlhf_rewards: list[float] = []
        self.model_state_mib: dict[str, float] = {}  # rank 0's weights, gradients, ...; filled by who measures them
        self.completions = 0

    def __enter__(self) -> "Reporter":
        if not self.speaks:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in OWN_FILES:
            (self.run_dir / name).unlink(missing_ok=True)
        (self.run_dir / "config.yaml").write_text(dump(self.config))
        trainer = self.config.trainer
        self.bar = ProgressBar(trainer.total_steps, quiet=self.quiet or "console" not in trainer.logger)
        self.loggers = Loggers(
            trainer.logger,
            self.run_dir,
            self.config.model_dump(mode="json"),
            trainer.project_name,
            trainer.experiment_name,
        )
        self.started = time.monotonic()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self.speaks:
            return
        self.bar.close()
        self.loggers.close()
        if kind is None:
            self._finish()

    def note(self, line: str) -> None:
        """One line about something that takes a while or that a person should know."""
        if self.speaks:
            self.bar.note(line)

    def step(self, step: int, rollouts: list[Rollout], metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """One finished step: metrics to every logger, a line or the bar, now and then a table of samples."""
        if not self.speaks:
            return
        found = rollout_metrics(rollouts) | metrics | {f"time/{name}": value for name, value in seconds.items()}
        self.completions += sum(len(r.completions) for r in rollouts)
        tokens = sum(len(c.token_ids) for r in rollouts for c in r.completions)
        elapsed = time.monotonic() - self.started
        found |= {
            "time/total": sum(seconds.values()),
            "throughput/tokens_per_second": tokens / sum(seconds.values()),
            "episode": self.completions,
            "eps": self.completions / elapsed,
        }
        self._record(step, found, seconds)
        self.summary.setdefault("train_reward_first", found["objective/scores"])
        self.summary["train_reward_last"] = found["objective/scores"]
        self.parity.append(found["parity/max_abs_logprob"])
        self.rlhf_rewards.append(found["objective/rlhf_reward"])
        if alarm := ratio_alarm(found):
            self.note(f"step {step}: {alarm}")
        every = self.config.trainer.sample_table_freq
        if every and step % every == 0:
            heat = self.config.rollout.temperature
            title = f"step {step}: sample completions, at temperature {heat:g}"
            rows = sample_table(rollouts, SAMPLE_ROWS, self.bar.console, title)
            self.loggers.table(step, [row | {"temperature": heat} for row in rows])

    def sft_step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """One finished step of supervised training."""
        if self.speaks:
            found = metrics | {f"time/{name}": value for name, value in seconds.items()}
            self._record(step, found | {"time/total": sum(seconds.values())}, seconds)
            self.summary["loss_last"] = metrics["loss"]

    def _record(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        self.loggers.log(step, metrics)
        self.bar.update(step, metrics)
        self.seconds.append(seconds | {"total": sum(seconds.values())})
        self.summary["steps"] = step

    def heldout(self, step: int, metrics: dict[str, float]) -> None:
        """What held-out prompts say after `step` steps (0: before the first)."""
        if not self.speaks:
            return
        self.loggers.log(step, metrics)
        parts = [
            f"{name.removeprefix('heldout/')} {value:.3f}" for name, value in metrics.items() if "accuracy" in name
        ]
        self.bar.note(f"step {step}: held-out {', '.join(parts)}")
        when = "before" if step == 0 else "after"
        for kind in ("sampled", "greedy", "pair"):
            if f"heldout/{kind}_accuracy" in metrics:
                self.summary[f"heldout_{kind}_{when}"] = metrics[f"heldout/{kind}_accuracy"]

    def _finish(self) -> None:
        if self.seconds:
            names = self.seconds[0]
            means = {name: sum(s[name] for s in self.seconds) / len(self.seconds) for name in names}
            self.summary["seconds_per_step"] = {name: round(value, 4) for name, value in means.items()}
        if self.parity:
            self.summary["parity_max_abs_logprob"] = float(np.max(self.parity))  # unlike max(), keeps a NaN
        if self.rlhf_rewards:
            first, last = first_and_last(self.rlhf_rewards)
            self.summary |= {"rlhf_reward_first": first, "rlhf_reward_last": last}
            course = "rose" if last > first else "did not rise"
            self.bar.note(f"objective/rlhf_reward {course}: {first:.3f} -> {last:.3f}")
        self.summary["seconds_in_all"] = round(time.monotonic() - self.started, 1)
        self.summary["completions"] = self.completions
        self.summary["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        if self.model_state_mib:
            self.summary["model_state_mib"] = {name: round(value, 3) for name, value in self.model_state_mib.items()}
            self.summary["peak_model_state_mib"] = round(sum(self.model_state_mib.values()), 3)
        (self.run_dir / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        left = ["summary.json", "model/"]
        if "jsonl" in self.config.trainer.logger:
            left += ["metrics.jsonl", plot_run(self.run_dir).name]
        self.bar.note(f"results in {self.run_dir}: {', '.join(left)}")


def ratio_alarm(metrics: dict[str, float]) -> str | None:
    """What to tell of a step whose mean policy ratio lies outside RATIOS; None where there is nothing to tell.

    A ratio of exactly 0 is that of a step which learnt from no token: an exponential is never 0.
    """
    ratio, (low, high) = metrics.get("val/ratio", 1.0), RATIOS
    if ratio == 0.0 or low <= ratio <= high:
        return None
    return (
        f"warning: val/ratio is {ratio:.3g}, not within {low:g} and {high:g}: the policy has moved far from the one "
        "before the update; lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size"
    )


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of a run's steps, at least one each: single steps are noisy."""
    tenth = max(1, len(values) // 10)
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))
