"""The whole configuration of `megarl train`, `sft` and `reward-model`, and what only holds between sections."""

from pydantic import SerializeAsAny, model_validator

from megarl.config.actor import ActorConfig, RefConfig
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import Section, key
from megarl.config.critic import CriticConfig
from megarl.config.data import DataConfig, PairDataConfig, SFTDataConfig
from megarl.config.model import FUSED_LINEAR_LOSS, FusedLinearLoss, ModelConfig, OptimConfig
from megarl.config.parallel import ParallelConfig
from megarl.config.reward_model import RewardModelConfig
from megarl.config.rollout import RewardConfig, RolloutConfig, SyncConfig
from megarl.config.trainer import RunConfig, TrainerConfig


def _world_size(trainer: RunConfig, parallel: ParallelConfig) -> int:
    per_node = trainer.n_gpus_per_node or parallel.tensor_model_parallel_size
    world, tp = per_node * trainer.nnodes, parallel.tensor_model_parallel_size
    if world % tp:
        raise ValueError(
            f"parallel.tensor_model_parallel_size={tp} does not divide the {world} trainer processes "
            f"(trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={per_node}); change one of them"
        )
    return world


def _check_examples(train_batch_size: int, world_size: int, parallel: ParallelConfig) -> None:
    if train_batch_size < world_size // parallel.tensor_model_parallel_size:
        raise ValueError(
            f"data.train_batch_size={train_batch_size} examples leave some of the data-parallel ranks without work; "
            "use at least one for each"
        )


class TrainConfig(Section):
    trainer: TrainerConfig = key(..., "How long, how often, where to.")
    parallel: ParallelConfig = key(ParallelConfig(), "How the trainer's models lie over its ranks.")
    data: DataConfig = key(..., "Where prompts come from.")
    actor: ActorConfig = key(..., "The trained policy.")
    ref: RefConfig = key(RefConfig(), "The frozen reference; loaded only when the algorithm asks for it.")
    critic: CriticConfig = key(CriticConfig(), "The value model; loaded only when the algorithm asks for it.")
    reward_model: RewardModelConfig = key(RewardModelConfig(), "A learned reward; none without a path.")
    rollout: RolloutConfig = key(RolloutConfig(), "The engines and how they sample.")
    reward: RewardConfig = key(RewardConfig(), "What a completion is worth.")
    algorithm: SerializeAsAny[AlgorithmConfig] = key(..., "The algorithm and its own keys.")
    sync: SyncConfig = key(SyncConfig(), "How new weights reach the engines.")

    @property
    def world_size(self) -> int:
        return _world_size(self.trainer, self.parallel)

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.parallel.tensor_model_parallel_size

    @property
    def completions_per_step(self) -> int:
        return self.data.train_batch_size * self.rollout.n

    @property
    def optimizer_steps(self) -> int:
        """The actor's optimizer steps of the whole run: the horizon of its learning-rate schedule."""
        mini_batches = self.completions_per_step // self.actor.ppo_mini_batch_size
        return (self.trainer.total_steps - self.trainer.critic_warmup) * self.actor.ppo_epochs * mini_batches

    @property
    def critic_optimizer_steps(self) -> int:
        """The same of the critic."""
        return (
            self.trainer.total_steps * self.critic_epochs * (self.completions_per_step // self.critic_mini_batch_size)
        )

    @property
    def critic_mini_batch_size(self) -> int:
        return self.critic.ppo_mini_batch_size or self.actor.ppo_mini_batch_size

    @property
    def critic_epochs(self) -> int:
        return self.critic.ppo_epochs or self.actor.ppo_epochs

    @property
    def critic_max_token_len_per_gpu(self) -> int:
        return self.critic.ppo_max_token_len_per_gpu or self.actor.ppo_max_token_len_per_gpu

    @property
    def log_prob_max_token_len_per_gpu(self) -> int:
        return self.actor.log_prob_max_token_len_per_gpu or 2 * self.actor.ppo_max_token_len_per_gpu

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    def _check_updates(self, role: str, mini_batch_size: int, max_tokens: int) -> None:
        if self.completions_per_step % mini_batch_size:
            raise ValueError(
                f"{role}.ppo_mini_batch_size={mini_batch_size} must divide the {self.completions_per_step} completions "
                f"of a step (data.train_batch_size={self.data.train_batch_size} x rollout.n={self.rollout.n}); it "
                "counts completions, not prompts"
            )
        if mini_batch_size < self.data_parallel_size:
            raise ValueError(
                f"{role}.ppo_mini_batch_size={mini_batch_size} completions leave some of the "
                f"{self.data_parallel_size} data-parallel ranks without work; use at least one for each"
            )
        if max_tokens < self.max_sequence_length:
            raise ValueError(
                f"{role}.ppo_max_token_len_per_gpu={max_tokens} is less than one sequence can hold "
                f"(data.max_prompt_length={self.data.max_prompt_length} + data.max_response_length="
                f"{self.data.max_response_length} = {self.max_sequence_length}); raise it or shorten the sequences"
            )

    @model_validator(mode="after")
    def _sections_agree(self):
        self.world_size  # noqa: B018 - raises when the layout does not fit
        self.algorithm.check_group_size(self.rollout.n)
        self._check_updates("actor", self.actor.ppo_mini_batch_size, self.actor.ppo_max_token_len_per_gpu)
        self._check_updates("critic", self.critic_mini_batch_size, self.critic_max_token_len_per_gpu)
        if self.trainer.critic_warmup >= self.trainer.total_steps:
            raise ValueError(
                f"trainer.critic_warmup={self.trainer.critic_warmup} leaves the actor none of the "
                f"trainer.total_steps={self.trainer.total_steps} steps"
            )
        if not (self.reward.functions or self.reward_model.path):
            raise ValueError("nothing gives a reward: set reward.functions, reward_model.path, or both")
        if self.log_prob_max_token_len_per_gpu < self.max_sequence_length:
            raise ValueError(
                f"actor.log_prob_max_token_len_per_gpu={self.actor.log_prob_max_token_len_per_gpu} is less than one "
                f"sequence can hold ({self.max_sequence_length} tokens); raise it or shorten the sequences"
            )
        if self.reward.overlong_buffer.len > self.data.max_response_length:
            raise ValueError(
                f"reward.overlong_buffer.len={self.reward.overlong_buffer.len} is more than "
                f"data.max_response_length={self.data.max_response_length}: every completion would be punished"
            )
        if self.rollout.dynamic_sampling_rounds and self.reward_model.path:
            raise ValueError(
                f"rollout.dynamic_sampling_rounds={self.rollout.dynamic_sampling_rounds} with reward_model.path: "
                "prompts are replaced before the reward model scores them; remove one of them"
            )
        if self.rollout.record_dir and self.rollout.replay_dir:
            raise ValueError("rollout.record_dir and rollout.replay_dir are both set: record or replay, not both")
        return self


class SFTConfig(Section):
    trainer: RunConfig = key(..., "How long, how often, where to.")
    parallel: ParallelConfig = key(ParallelConfig(), "How the model lies over the ranks.")
    model: ModelConfig = key(..., "The model to train.")
    optim: OptimConfig = key(OptimConfig(lr=1e-5), "Adam and the learning-rate schedule.")
    data: SFTDataConfig = key(..., "Examples: a prompt and its answer.")
    max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch. Changes memory and speed, never the gradient.", gt=0
    )
    fused_linear_loss: FusedLinearLoss = key("auto", FUSED_LINEAR_LOSS)
    stop_at_exact_match: float | None = key(
        None,
        "Stop when greedy decoding would answer this share of data.val_files exactly. Default: run all steps.",
        gt=0,
        le=1,
    )

    @property
    def world_size(self) -> int:
        return _world_size(self.trainer, self.parallel)

    @model_validator(mode="after")
    def _sections_agree(self):
        self.world_size  # noqa: B018 - raises when the layout does not fit
        if self.max_token_len_per_gpu < self.data.max_length:
            raise ValueError(
                f"max_token_len_per_gpu={self.max_token_len_per_gpu} is less than one example can hold "
                f"(data.max_length={self.data.max_length}); raise it or shorten the examples"
            )
        _check_examples(self.data.train_batch_size, self.world_size, self.parallel)
        if self.stop_at_exact_match and not (self.data.val_files and self.trainer.test_freq):
            raise ValueError("stop_at_exact_match needs data.val_files and trainer.test_freq > 0")
        return self


class RewardModelTrainConfig(Section):
    trainer: RunConfig = key(..., "How long, how often, where to.")
    parallel: ParallelConfig = key(ParallelConfig(), "How the model lies over the ranks.")
    model: ModelConfig = key(
        ..., "The model to start from: a causal model, which gets a score head of zeros, or a reward model."
    )
    optim: OptimConfig = key(OptimConfig(lr=1e-5), "Adam and the learning-rate schedule.")
    data: PairDataConfig = key(..., "Preferences: a prompt, a chosen answer and a rejected one.")
    max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch. Changes memory and speed, never the gradient.", gt=0
    )

    @property
    def world_size(self) -> int:
        return _world_size(self.trainer, self.parallel)

    @model_validator(mode="after")
    def _sections_agree(self):
        if self.max_token_len_per_gpu < 2 * self.data.max_length:
            raise ValueError(
                f"max_token_len_per_gpu={self.max_token_len_per_gpu} is less than one pair can hold "
                f"(2 x data.max_length={self.data.max_length}); raise it or shorten the answers"
            )
        _check_examples(self.data.train_batch_size, self.world_size, self.parallel)
        return self
