"""The commands: train, sft, reward-model, evaluate, judge, explain, make-task."""

import asyncio
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from megarl import __version__, algorithms, launcher
from megarl.config import explain as explaining
from megarl.config.hints import hints
from megarl.config.load import load
from megarl.config.root import RewardModelTrainConfig, SFTConfig, TrainConfig
from megarl.config.summary import batch_table
from megarl.errors import MegarlError
from megarl.parallel.coordinates import ParallelSizes
from megarl.versions import check_megatron, check_vllm

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Online reinforcement learning for language models at Megatron speed.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's overlap of tensor-parallel communication counts on its order
}
Layers = Annotated[list[str], typer.Argument(help="YAML files (later ones win), then key=value overrides.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run, check it, and start nothing.")]


def _read(root, layers: list[str]):
    files = [Path(item) for item in layers if "=" not in item]
    overrides = [item for item in layers if "=" in item]
    return load(root, files, overrides, lambda name: algorithms.get(name).Config, notify=_notify)


def _notify(line: str) -> None:
    if not launcher.is_rank():
        print(f"note: {line}", file=sys.stderr)


def _check_output_dir(config) -> None:
    folder = Path(config.trainer.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"trainer.output_dir={folder} is a file; name a folder")
    metrics = folder / "metrics.jsonl"  # a run that failed before its first step has none, and may be tried again
    finished_a_step = (folder / "summary.json").exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if finished_a_step and not config.trainer.overwrite_output_dir:
        raise ValueError(
            f"trainer.output_dir={folder} already holds a run; choose another, or set trainer.overwrite_output_dir=true"
        )


def _check_model(path: str, config, transformer_impl: str) -> None:
    from megarl.models import hf_files, supported

    hf, tp = hf_files.load_config(path), config.parallel.tensor_model_parallel_size
    supported.check(hf, ParallelSizes(tp, tp=tp), transformer_impl)
    supported.check_training(hf, ParallelSizes(tp, tp=tp), config.parallel.sequence_parallel)
    hf_files.Checkpoint(path)


def _check_models(config: TrainConfig) -> None:
    from megarl.models import hf_files, supported
    from megarl.training.check import check, without_effect

    model, rollout = config.actor.model, config.rollout
    _check_model(model.path, config, model.transformer_impl)
    needs = algorithms.get(config.algorithm.name).needs(config.algorithm)
    check(config, needs)
    for line in without_effect(config, needs):
        _notify(line)
    for path, loaded in [
        (config.ref.model_path, needs.reference),
        (config.critic.model_path, needs.critic),
        (config.reward_model.path, True),
    ]:
        if path and loaded:
            _check_model(path, config, model.transformer_impl)
    if config.reward_model.path:
        hf_files.check_reward_model(config.reward_model.path)
    if not rollout.replay_dir:
        hf = hf_files.load_config(model.path)
        supported.check_engine(hf, rollout.tensor_model_parallel_size, config.max_sequence_length)


def _check_rewards(config: TrainConfig) -> None:
    """Import the reward functions as a run does: in a worker, which may be killed."""
    from megarl.rewards.workers import RewardWorkers

    async def work() -> None:
        workers = RewardWorkers(config.reward)
        try:
            await workers.start()
        finally:
            await workers.close()

    if config.reward.functions:
        asyncio.run(work())


def _run(config, command: str, layers: list[str], quiet: bool, debug: bool, work) -> None:
    """As a rank: work. As a user's process: start the ranks."""
    if launcher.is_rank():
        launcher.end_with_parent()
        from megarl.parallel.layout import check_world_size

        check_world_size(config.world_size, config.parallel)
        work(config, quiet)
        return
    if config.trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={config.trainer.nnodes}: start `megarl {command}` with torchrun on every node; "
            "launch/slurm/train.sbatch does it under Slurm"
        )
    flags = [flag for flag, given in (("-q", quiet), ("--debug", debug)) if given]
    raise typer.Exit(launcher.launch([command, *layers, *flags], config.world_size))


@app.command()
def train(layers: Layers, dry_run: DryRun = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Train a policy with online reinforcement learning."""
    config = _read(TrainConfig, layers)
    if launcher.checks_input():
        check_megatron()
        if not config.rollout.replay_dir:
            check_vllm()
        _check_output_dir(config)
        _check_models(config)
    if dry_run:
        _check_rewards(config)
        needs = algorithms.get(config.algorithm.name).needs(config.algorithm)
        _show(config, batch_table(config, needs.critic))
        for line in hints(config):
            _notify(line)
        return

    def work(config, quiet):
        from megarl.trainer import train as run

        run(config, quiet)

    _run(config, "train", layers, quiet, debug, work)


@app.command()
def sft(layers: Layers, dry_run: DryRun = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Train a model on demonstrations (a supervised warm start)."""
    config = _supervised(SFTConfig, layers, dry_run)

    def work(config, quiet):
        from megarl.sft import sft as run

        run(config, quiet)

    if not dry_run:
        _run(config, "sft", layers, quiet, debug, work)


@app.command("reward-model")
def reward_model(layers: Layers, dry_run: DryRun = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Train a reward model on pairs of a chosen and a rejected answer."""
    config = _supervised(RewardModelTrainConfig, layers, dry_run)

    def work(config, quiet):
        from megarl.sft import reward_model as run

        run(config, quiet)

    if not dry_run:
        _run(config, "reward-model", layers, quiet, debug, work)


def _supervised(root, layers: list[str], dry_run: bool):
    """The configuration of a supervised command, checked, and shown where that is all."""
    config = _read(root, layers)
    if launcher.checks_input():
        check_megatron()
        _check_output_dir(config)
        _check_model(config.model.path, config, config.model.transformer_impl)
    if dry_run:
        _show(config, [("trainer ranks", str(config.world_size))])
    return config


def _show(config, rows: list[tuple[str, str]]) -> None:
    print(explaining.dump(config))
    table = Table("what", "how many", title="This run")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@app.command()
def evaluate(
    layers: Layers,
    answer: Annotated[
        str | None, typer.Option(help="Regular expression whose (first group's) last match is the answer that votes.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out prompts: greedy and sampled accuracy, pass@k, maj@k, each with its 95 % interval.

    CONFIG is a training configuration, or the config.yaml of a run; name the model with actor.model.path=FOLDER and the
    samples per prompt with rollout.val_kwargs.n=16.
    """
    from megarl.evaluation import evaluate as measure

    config = _engines_only(layers)
    with tempfile.TemporaryDirectory(prefix="megarl-evaluate-") as folder:
        found = measure(config, Path(folder), _to_stderr(quiet), answer)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        as_json = {name: dict(zip(("mean", "low", "high"), values, strict=True)) for name, values in found.items()}
        output.write_text(json.dumps({"model": config.actor.model.path, "results": as_json}, indent=2) + "\n")
    table = Table("what", "mean", "95 % interval", title=config.actor.model.path)
    for name, (mean, low, high) in found.items():
        table.add_row(name, f"{mean:.4f}", f"{low:.4f} .. {high:.4f}")
    Console().print(table)


@app.command()
def judge(
    layers: Layers,
    rule: Annotated[
        str | None, typer.Option(help="Offline judge: a reward function, by name or path.py:function; more wins.")
    ] = None,
    judge_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint, like http://host:8000/v1.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's model name there.")] = None,
    judge_key_env: Annotated[str | None, typer.Option(help="Environment variable with the endpoint's key.")] = None,
    against: Annotated[str | None, typer.Option(help="Another model, instead of reference answers.")] = None,
    reference_column: Annotated[
        str | None, typer.Option(help="Column with the reference answers. Default: the ground truth.")
    ] = None,
    num_examples: Annotated[int, typer.Option(help="Held-out prompts to judge.", min=1)] = 1000,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say how often a judge prefers the model's greedy answers: each pair asked in both orders, ties half a win."""
    from megarl import judging
    from megarl.rewards.judge import Endpoint

    by_endpoint = judge_url is not None and judge_model is not None
    parts_of_an_endpoint = {judge_url, judge_model, judge_key_env} - {None}
    if by_endpoint == (rule is not None) or (rule is not None and parts_of_an_endpoint):
        raise ValueError("name one judge: --rule, or --judge-url with --judge-model")
    if against is not None and reference_column is not None:
        raise ValueError("--against and --reference-column both say what the answers are compared with; keep one")
    offline = None if rule is None else judging.load_rule(rule)
    config, tell = _engines_only(layers), _to_stderr(quiet)
    endpoint = Endpoint(judge_url, judge_model, judge_key_env) if by_endpoint else None
    with tempfile.TemporaryDirectory(prefix="megarl-judge-") as folder:
        rollouts = judging.answers_of(config, Path(folder, "model"), tell, num_examples)
        if against is None:
            others = judging.references(rollouts, reference_column or "ground_truth")
        else:
            rival = _engines_only([*layers, f"actor.model.path={against}"])
            answers = judging.answers_of(rival, Path(folder, "against"), tell, num_examples)
            others = [rollout.texts[0] for rollout in answers]
    found = judging.by_rule(rollouts, others, offline) if offline else judging.by_model(rollouts, others, endpoint)
    print(f"Model win rate: {100 * found.rate:.2f}%")
    print(
        f"95 % interval {100 * found.low:.2f}% .. {100 * found.high:.2f}%; {found.prompts} prompts, {found.ties} ties "
        f"(half a win each), of which {found.inconsistent} because the judge named the place and not the answer, and "
        f"{found.unclear} because a reply of its named neither"
    )


def _engines_only(layers: list[str]) -> TrainConfig:
    """A training configuration for a command that needs its engines and no trainer ranks."""
    from megarl.models import hf_files, supported

    config = _read(TrainConfig, layers)
    check_vllm()
    hf = hf_files.load_config(config.actor.model.path)
    hf_files.Checkpoint(config.actor.model.path)
    supported.check_engine(hf, config.rollout.tensor_model_parallel_size, config.max_sequence_length)
    return config


def _to_stderr(quiet: bool):
    return lambda line: None if quiet else print(line, file=sys.stderr)


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key, like actor.optim.lr, or a section, like actor.")] = "",
    command: Annotated[
        Literal["train", "sft", "reward-model"], typer.Option("--command", "-c", help="Whose configuration.")
    ] = "train",
    debug: Debug = False,
) -> None:
    """Say what a configuration key does; without a key, list the sections."""
    root = {"train": TrainConfig, "sft": SFTConfig, "reward-model": RewardModelTrainConfig}[command]
    print(explaining.explain(key, root, {name: algorithms.get(name).Config for name in algorithms.names()}))


@app.command("make-task")
def make_task(
    name: Annotated[str, typer.Argument(help="The task; arithmetic is the only one.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for tokenizer, data and initial model.")],
    seed: Annotated[int, typer.Option(help="Seeds the demonstrations' noise and the initial weights.")] = 0,
    debug: Debug = False,
) -> None:
    """Make a small task locally: tokenizer, data and a randomly initialised model."""
    if name != "arithmetic":
        raise ValueError(f"unknown task {name!r}; known: arithmetic")
    from megarl.data.arithmetic import make_arithmetic_task

    make_arithmetic_task(output_dir, seed)


def _version(show: bool) -> None:
    if show:
        print(f"megarl {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: one clear line for what a user can mend, a traceback only with --debug."""
    debug = "--debug" in sys.argv
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not debug:  # deprecations and missing accelerators inside the libraries are not the user's to mend
        warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")
    try:
        app()
    except (ValueError, MegarlError, OSError) as error:
        if debug:
            raise
        _end(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not debug and _is_out_of_memory(error):
            _end(MegarlError(f"{str(error).splitlines()[0]} {_LESS_MEMORY}"))
        launcher.wait_for_the_cause()
        raise


def _end(error: Exception) -> None:
    if not launcher.tell_launcher(error):
        rank = f"[rank {os.environ['RANK']}] " if launcher.is_rank() else ""
        print(f"{rank}error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ValueError) else 1)


_LESS_MEMORY = (
    "Smaller micro-batches need less and change no gradient: lower actor.ppo_max_token_len_per_gpu (the update) and "
    "actor.log_prob_max_token_len_per_gpu (log-probs), in sft and reward-model max_token_len_per_gpu. Or spread each "
    "model over more ranks (parallel.tensor_model_parallel_size, parallel.sequence_parallel=true), or recompute "
    "(actor.model.enable_gradient_checkpointing=true)"
)


def _is_out_of_memory(error: Exception) -> bool:
    """Of a GPU, or of the machine. Told by names: the command line starts without torch."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
