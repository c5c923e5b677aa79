"""The models of a run: the actor, and what its algorithm and its reward ask for besides."""

from dataclasses import dataclass

from megarl.algorithms.interface import Needs
from megarl.config.root import TrainConfig
from megarl.parallel.layout import Layout
from megarl.training.critic import Critic
from megarl.training.megatron_model import MegatronModel
from megarl.training.policy import Policy
from megarl.training.reward_model import RewardModel, RewardScorer


@dataclass(frozen=True)
class Roles:
    """All of them lie over the same ranks, and take turns."""

    actor: Policy
    reference: Policy | None = None  # frozen
    critic: Critic | None = None
    reward_model: RewardScorer | None = None

    @property
    def models(self) -> list[MegatronModel]:
        """Those that the algorithm asks for."""
        return [model for model in (self.actor, self.reference, self.critic) if model is not None]


def load_roles(config: TrainConfig, needs: Needs, layout: Layout) -> Roles:
    """Load what is asked for, and nothing else. Collective.

    Raises:
        ValueError: a checkpoint cannot be read or does not fit its role or the layout.
    """
    model, heat, fused = config.actor.model, config.rollout.temperature, config.actor.fused_linear_loss

    def of(path: str | None, **changes):
        return model.model_copy(update={"path": path or model.path, **changes})

    reference = critic = reward_model = None
    actor = Policy(model, layout, heat, config.actor.optim, config.optimizer_steps, fused)
    if needs.reference:
        reference = Policy(of(config.ref.model_path), layout, heat, fused_linear_loss=fused)
    if needs.critic:
        settings = config.critic
        critic = Critic(
            of(settings.model_path),
            layout,
            settings.optim,
            config.critic_optimizer_steps,
            settings.cliprange_value,
            settings.vf_coef,
        )
    if config.reward_model.path:
        settings = config.reward_model
        frozen = RewardModel(of(settings.path, dtype=settings.dtype or model.dtype), layout)
        reward_model = RewardScorer(
            frozen, settings.weight, settings.max_length, settings.truncation, settings.max_token_len_per_gpu
        )
    return Roles(actor, reference, critic, reward_model)
