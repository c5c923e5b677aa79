"""The batch-size arithmetic of a configuration: for `megarl train --dry-run`, and one line of it for every run."""

from __future__ import annotations

from megarl.config.root import TrainConfig


def batch_table(config: TrainConfig, has_critic: bool = False) -> list[tuple[str, str]]:
    """Rows (what, how much) that say what a step is made of and what would be started."""
    critic = _critic(config) if has_critic else []
    return [*_layout(config), *_step(config), *critic, *_tokens(config), *_processes(config)]


def step_in_words(config: TrainConfig) -> str:
    """What a step is made of, in one line: other systems count prompts where megarl counts completions."""
    return (
        f"a step: {config.data.train_batch_size:,} prompts x {config.rollout.n} (rollout.n) = "
        f"{config.completions_per_step:,} completions, in mini-batches of {config.actor.ppo_mini_batch_size:,} "
        "completions (actor.ppo_mini_batch_size)"
    )


def _layout(config: TrainConfig) -> list[tuple[str, str]]:
    world, tp, dp = config.world_size, config.parallel.tensor_model_parallel_size, config.data_parallel_size
    nodes = config.trainer.nnodes
    return [
        ("trainer ranks", f"{world} = {nodes} node(s) x {world // nodes}"),
        ("layout of the ranks", f"tensor parallel {tp} x data parallel {dp}"),
    ]


def _step(config: TrainConfig) -> list[tuple[str, str]]:
    prompts, n, epochs = config.data.train_batch_size, config.rollout.n, config.actor.ppo_epochs
    completions, mini_batch, steps = (
        config.completions_per_step,
        config.actor.ppo_mini_batch_size,
        config.trainer.total_steps - config.trainer.critic_warmup,
    )
    mini_batches, dp = completions // mini_batch, config.data_parallel_size
    per_rank = f"{mini_batch / dp:g}" if mini_batch % dp == 0 else f"about {mini_batch / dp:.1f}"
    return [
        ("prompts per step", f"{prompts:,} (data.train_batch_size)"),
        ("completions per step", f"{completions:,} = {prompts:,} prompts x {n} (rollout.n)"),
        ("mini-batches per step", f"{mini_batches} of {mini_batch:,} completions (actor.ppo_mini_batch_size)"),
        ("mini-batch per data-parallel rank", f"{per_rank} completions, balanced by tokens"),
        ("optimizer steps per step", f"{epochs * mini_batches} = {epochs} pass(es) x {mini_batches} mini-batches"),
        ("optimizer steps in total", f"{config.optimizer_steps:,} = {steps:,} steps x {epochs * mini_batches}"),
        ("completions in total", f"{config.trainer.total_steps * completions:,}"),
    ]


def _critic(config: TrainConfig) -> list[tuple[str, str]]:
    completions, mini_batch, epochs = config.completions_per_step, config.critic_mini_batch_size, config.critic_epochs
    mini_batches, steps = completions // mini_batch, config.trainer.total_steps
    return [
        ("critic's mini-batches per step", f"{mini_batches} of {mini_batch:,} completions, {epochs} pass(es)"),
        (
            "critic's optimizer steps in total",
            f"{config.critic_optimizer_steps:,} = {steps:,} steps x {epochs * mini_batches}",
        ),
    ]


def _tokens(config: TrainConfig) -> list[tuple[str, str]]:
    longest = config.max_sequence_length

    def budget(tokens: int, key: str) -> str:
        return f"at most {tokens:,} tokens ({key}): {tokens // longest:,} of the longest sequences"

    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return [
        ("longest sequence", f"{longest:,} tokens = {prompt:,} prompt + {response:,} completion"),
        (
            "micro-batch of the update",
            budget(config.actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu"),
        ),
        (
            "micro-batch of log-probs",
            budget(config.log_prob_max_token_len_per_gpu, "actor.log_prob_max_token_len_per_gpu"),
        ),
    ]


def _processes(config: TrainConfig) -> list[tuple[str, str]]:
    trainers = f"{config.world_size} trainer rank(s)"
    if config.rollout.replay_dir:
        return [("would be started", f"{trainers}; no engine: rollouts are read from {config.rollout.replay_dir}")]
    engines, tp = config.rollout.num_engines, config.rollout.tensor_model_parallel_size
    return [("would be started", f"{trainers}, 1 rollout driver, {engines} vLLM engine(s) x tensor parallel {tp}")]
