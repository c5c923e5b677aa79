"""`actor.*` and `ref.*`: the trained policy and the frozen reference."""

from megarl.config.base import Section, key
from megarl.config.model import FUSED_LINEAR_LOSS, FusedLinearLoss, ModelConfig, OptimConfig


class ActorConfig(Section):
    model: ModelConfig = key(..., "The policy's checkpoint and types.")
    optim: OptimConfig = key(OptimConfig(), "Adam and the learning-rate schedule; one optimizer step per mini-batch.")
    ppo_mini_batch_size: int = key(
        ..., "Trajectories (completions, not prompts) per optimizer step, over all data-parallel ranks.", gt=0
    )
    ppo_epochs: int = key(1, "Passes over one batch of rollouts, each with a fresh shuffle.", gt=0)
    ppo_max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch in the update. Changes memory and speed, never the gradient.", gt=0
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "Tokens per micro-batch in the log-prob passes. Default: twice ppo_max_token_len_per_gpu.", gt=0
    )
    fused_linear_loss: FusedLinearLoss = key("auto", FUSED_LINEAR_LOSS)


class RefConfig(Section):
    model_path: str | None = key(None, "The frozen reference's checkpoint. Default: actor.model.path.")
