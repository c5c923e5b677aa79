"""`critic.*`: the value model of algorithms that have one."""

from pydantic import model_validator

from megarl.config.base import Section, key
from megarl.config.model import OptimConfig


class CriticConfig(Section):
    model_path: str | None = key(
        None,
        "The critic's checkpoint: a sequence classifier with one label, or a causal model, which gets a value head of "
        "zeros. Types and recomputation are those of actor.model. Default: actor.model.path.",
    )
    optim: OptimConfig = key(OptimConfig(lr=1e-5), "Adam and the learning-rate schedule of the critic.")
    ppo_mini_batch_size: int | None = key(
        None,
        "Trajectories (completions, not prompts) per optimizer step of the critic. Default: actor.ppo_mini_batch_size.",
        gt=0,
    )
    ppo_epochs: int | None = key(
        None, "Passes of the critic over one batch of rollouts. Default: actor.ppo_epochs.", gt=0
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "Tokens per micro-batch of the critic's update, and half of those of its values. Changes memory and speed, "
        "never the gradient. Default: actor.ppo_max_token_len_per_gpu.",
        gt=0,
    )
    cliprange_value: float = key(
        0.5, "The value loss is clipped where a value leaves the one before the update by more than this.", gt=0
    )
    vf_coef: float = key(
        1.0,
        "Multiplies the critic's loss, and so its gradient before critic.optim.clip_grad: with 0.1 a gradient is "
        "clipped only when it is ten times as large. That is its whole effect, since Adam divides a constant factor "
        "out; critic.optim.lr is what makes the critic faster or slower.",
        gt=0,
    )

    @model_validator(mode="after")
    def _coefficient_has_an_effect(self):
        if self.vf_coef != 1.0 and self.optim.clip_grad == 0:
            raise ValueError(
                f"critic.vf_coef={self.vf_coef:g} with critic.optim.clip_grad=0 would change nothing: actor and critic "
                "are separate models, and Adam divides a constant factor of the loss out. Set critic.optim.lr instead"
            )
        return self
