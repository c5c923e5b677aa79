"""`trainer.*`: how long, how often, where to."""

from typing import Literal

from pydantic import field_validator

from megarl.config.base import Section, key


class RunConfig(Section):
    """What every kind of training has."""

    output_dir: str = key(..., "Run folder: metrics.jsonl, config.yaml, reward.png, summary.json, model/, logs/.")
    overwrite_output_dir: bool = key(False, "Allow an output_dir that already holds a run; its files are replaced.")
    total_steps: int = key(..., "Training steps; one step collects data.train_batch_size prompts.", gt=0)
    n_gpus_per_node: int | None = key(
        None,
        "Trainer processes on each node: one per GPU, or one per group of cores on a CPU. Default: one model replica, "
        "that is parallel.tensor_model_parallel_size.",
        gt=0,
    )
    nnodes: int = key(1, "Nodes. With more than one, start `megarl train` under torchrun (see launch/slurm).", gt=0)
    seed: int = key(0, "Seeds prompt order, sampling, shuffles and weight initialisation.", ge=0)
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = key(
        ["console", "jsonl"], "Where metrics go. wandb runs offline when it has no API key."
    )
    project_name: str = key("megarl", "Project name for wandb.")
    experiment_name: str | None = key(None, "Run name for wandb. Default: the name of output_dir.")
    test_freq: int = key(20, "Validate on data.val_files every so many steps and after the last; 0: neither.", ge=0)
    save_freq: int = key(0, "Export Hugging Face weights every so many steps; 0 only at the end.", ge=0)

    @field_validator("logger", mode="before")
    @classmethod
    def _as_list(cls, value):
        return [value] if isinstance(value, str) else value


class TrainerConfig(RunConfig):
    """What online training has beyond that."""

    critic_warmup: int = key(
        0, "Steps at the start in which only the critic learns; for algorithms with a critic.", ge=0
    )
    val_before_train: bool = key(True, "Also validate before the first step.")
    sample_table_freq: int = key(20, "Print a table of sample completions every so many steps; 0 never does.", ge=0)
