"""Other tools' spellings of megarl's keys: verl's, TRL's, and some misspellings that guides carry.

An alias that stands for two keys (verl's clip_ratio) fills those of them that the same file does not set by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import Section
from megarl.config.root import RewardModelTrainConfig, SFTConfig, TrainConfig

_CLIP = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")

# Tried in this order, where the spelling itself is neither a key nor an alias.
PREFIXES = (
    ("actor_rollout_ref.model.", "actor.model."),
    ("actor_rollout_ref.", ""),
    ("actor_rollout.ref.", ""),  # as misspelt in a guide
)

TRAIN: dict[str, tuple[str, ...]] = {
    # verl
    "actor.clip_ratio": _CLIP,
    "actor.clip_ratio_c": ("algorithm.clip_ratio_c",),
    "actor.clip_ratio_low": ("algorithm.clip_ratio_low",),
    "actor.clip_ratio_high": ("algorithm.clip_ratio_high",),
    "actor.entropy_coeff": ("algorithm.entropy_coeff",),
    "actor.grad_clip": ("actor.optim.clip_grad",),
    "actor.kl_loss_coef": ("algorithm.kl_loss_coef",),
    "actor.kl_loss_type": ("algorithm.kl_loss_type",),
    "actor.loss_agg_mode": ("algorithm.loss_agg_mode",),
    "actor.loss_scale_factor": ("algorithm.loss_scale_factor",),
    "actor.use_kl_loss": ("algorithm.use_kl_loss",),
    "actor.megatron.sequence_parallel": ("parallel.sequence_parallel",),
    "actor.megatron.tensor_model_parallel_size": ("parallel.tensor_model_parallel_size",),
    "actor.optim.lr_decay_style": ("actor.optim.lr_scheduler_type",),
    "actor.optim.warmup_style": ("actor.optim.lr_scheduler_type",),
    "algorithm.adv_estimator": ("algorithm.name",),
    "algorithm.clip_ratio": _CLIP,
    "algorithm.gemma": ("algorithm.gamma",),  # as misspelt in a guide
    "critic.grad_clip": ("critic.optim.clip_grad",),
    "critic.model.path": ("critic.model_path",),
    "critic.optim.lr_decay_style": ("critic.optim.lr_scheduler_type",),
    "critic.optim.warmup_style": ("critic.optim.lr_scheduler_type",),
    "ref.log_prob_max_token_len_per_gpu": ("actor.log_prob_max_token_len_per_gpu",),
    "ref.model.path": ("ref.model_path",),
    "reward_model.model.path": ("reward_model.path",),
    "reward_model.overlong_buffer.len": ("reward.overlong_buffer.len",),
    "reward_model.overlong_buffer.penalty_factor": ("reward.overlong_buffer.penalty_factor",),
    "rollout.log_prob_max_token_len_per_gpu": ("actor.log_prob_max_token_len_per_gpu",),
    "rollout.prompt_length": ("data.max_prompt_length",),
    "rollout.response_length": ("data.max_response_length",),
    "trainer.default_local_dir": ("trainer.output_dir",),
    "trainer.total_training_steps": ("trainer.total_steps",),
    # TRL
    "adam_epsilon": ("actor.optim.eps",),
    "beta": ("algorithm.beta",),
    "cliprange": _CLIP,
    "cliprange_value": ("critic.cliprange_value",),
    "dataset_name": ("data.train_files",),
    "epsilon": _CLIP,
    "epsilon_high": ("algorithm.clip_ratio_high",),
    "eval_steps": ("trainer.test_freq",),
    "gamma": ("algorithm.gamma",),
    "gradient_checkpointing": ("actor.model.enable_gradient_checkpointing",),
    "kl_coef": ("algorithm.kl_ctrl.kl_coef",),
    "lam": ("algorithm.lam",),
    "learning_rate": ("actor.optim.lr",),
    "loss_type": ("algorithm.loss_type",),
    "lr_scheduler_type": ("actor.optim.lr_scheduler_type",),
    "max_completion_length": ("data.max_response_length",),
    "max_grad_norm": ("actor.optim.clip_grad",),
    "max_new_tokens": ("data.max_response_length",),
    "max_prompt_length": ("data.max_prompt_length",),
    "max_steps": ("trainer.total_steps",),
    "missing_eos_penalty": ("reward.missing_eos_penalty",),
    "model_name_or_path": ("actor.model.path",),
    "normalize_advantage": ("algorithm.normalize_advantage",),
    "normalize_reward": ("algorithm.normalize_reward",),
    "num_generation": ("rollout.n",),  # as misspelt in a guide
    "num_generations": ("rollout.n",),
    "num_iterations": ("actor.ppo_epochs",),
    "num_ppo_epochs": ("actor.ppo_epochs",),
    "output_dir": ("trainer.output_dir",),
    "overwrite_output_dir": ("trainer.overwrite_output_dir",),
    "response_length": ("data.max_response_length",),
    "reward_clip_range": ("algorithm.reward_clip_range",),
    "reward_funcs": ("reward.functions",),
    "reward_model_path": ("reward_model.path",),
    "rloo_k": ("rollout.n",),
    "run_name": ("trainer.experiment_name",),
    "save_steps": ("trainer.save_freq",),
    "seed": ("trainer.seed",),
    "shuffle_dataset": ("data.shuffle",),
    "stop_token": ("reward.stop_token",),
    "stop_token_id": ("reward.stop_token_id",),
    "temperature": ("rollout.temperature",),
    "token_level_kl": ("algorithm.token_level_kl",),
    "vf_coef": ("critic.vf_coef",),
    "vllm_gpu_memory_utilization": ("rollout.gpu_memory_utilization",),
    "vllm_tensor_parallel_size": ("rollout.tensor_model_parallel_size",),
    "warmup_steps": ("actor.optim.lr_warmup_steps",),
    "weight_decay": ("actor.optim.weight_decay",),
    "whiten_rewards": ("algorithm.whiten_rewards",),
}

SFT: dict[str, tuple[str, ...]] = {
    # verl
    "model.partial_pretrain": ("model.path",),
    "optim.lr_scheduler": ("optim.lr_scheduler_type",),
    "optim.warmup_style": ("optim.lr_scheduler_type",),
    "trainer.default_local_dir": ("trainer.output_dir",),
    "trainer.total_training_steps": ("trainer.total_steps",),
    # TRL
    "adam_epsilon": ("optim.eps",),
    "dataset_name": ("data.train_files",),
    "eval_steps": ("trainer.test_freq",),
    "gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "learning_rate": ("optim.lr",),
    "lr_scheduler_type": ("optim.lr_scheduler_type",),
    "max_grad_norm": ("optim.clip_grad",),
    "max_length": ("data.max_length",),
    "max_seq_length": ("data.max_length",),
    "max_steps": ("trainer.total_steps",),
    "model_name_or_path": ("model.path",),
    "output_dir": ("trainer.output_dir",),
    "overwrite_output_dir": ("trainer.overwrite_output_dir",),
    "run_name": ("trainer.experiment_name",),
    "save_steps": ("trainer.save_freq",),
    "seed": ("trainer.seed",),
    "warmup_steps": ("optim.lr_warmup_steps",),
    "weight_decay": ("optim.weight_decay",),
}


@dataclass(frozen=True)
class InPrompts:
    """A batch size that was given in prompts where megarl counts completions: times rollout.n, once that is known."""

    prompts: Any


def aliases_of(root: type[Section]) -> dict[str, tuple[str, ...]]:
    """Spelling -> the keys that it stands for, in the configuration `root`."""
    if issubclass(root, TrainConfig):
        return TRAIN
    return SFT if issubclass(root, (SFTConfig, RewardModelTrainConfig)) else {}


def resolve(spelling: str, root: type[Section]) -> tuple[str, ...]:
    """The keys that a spelling stands for: itself where it is no alias."""
    aliases = aliases_of(root)
    if spelling in aliases:
        return aliases[spelling]
    if issubclass(root, TrainConfig):
        for prefix, own in PREFIXES:
            if spelling.startswith(prefix):
                return resolve(own + spelling.removeprefix(prefix), root)
    return (spelling,)


def convert(spelling: str, value: Any) -> Any:
    """The value in megarl's words: verl's ppo_mini_batch_size counts prompts, and its PPO is named by its estimator."""
    if spelling == "algorithm.adv_estimator" and value == "gae":
        return "ppo"
    roles = ("actor", "critic")
    in_prompts = {f"{prefix}{role}.ppo_mini_batch_size" for prefix, _ in PREFIXES for role in roles}
    return InPrompts(value) if spelling in in_prompts else value
