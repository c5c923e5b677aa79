"""What must hold between a configuration and what its algorithm needs; without Megatron, so that it is quick."""

from megarl.algorithms.interface import Needs
from megarl.config.root import TrainConfig


def without_effect(config: TrainConfig, needs: Needs) -> list[str]:
    """A line for each section that was set for a model that the algorithm does not load."""
    name = config.algorithm.name
    found = []
    if not needs.critic and config.critic.model_fields_set:
        given = ", ".join(f"critic.{key}" for key in sorted(config.critic.model_fields_set))
        found.append(f"{given}: without effect, algorithm.name={name} has no critic")
    if not needs.reference and config.ref.model_path:
        found.append(f"ref.model_path={config.ref.model_path}: without effect, no KL asks for a reference")
    return found


def check(config: TrainConfig, needs: Needs) -> None:
    """Refuse, before any process is started, what the update could not do.

    Raises:
        ValueError: a critic's warm-up without a critic; mini-batches or micro-batches that cut the algorithm's groups,
            or leave data-parallel ranks without a group.
    """
    if config.trainer.critic_warmup and not needs.critic:
        raise ValueError(
            f"trainer.critic_warmup={config.trainer.critic_warmup}, but algorithm.name={config.algorithm.name} has no "
            "critic; set it to 0"
        )
    if not needs.whole_groups:
        return
    n, mini_batch_size, dp = config.rollout.n, config.actor.ppo_mini_batch_size, config.data_parallel_size
    if mini_batch_size % n or mini_batch_size // n < dp:
        raise ValueError(
            f"actor.ppo_mini_batch_size={mini_batch_size} must be a multiple of rollout.n={n} and hold at least one "
            f"prompt for each of the {dp} data-parallel ranks: {config.algorithm.name} compares the completions of a "
            "prompt within a mini-batch"
        )
    longest = n * config.max_sequence_length
    if config.actor.ppo_max_token_len_per_gpu < longest:
        raise ValueError(
            f"actor.ppo_max_token_len_per_gpu={config.actor.ppo_max_token_len_per_gpu} is less than the {n} "
            f"completions of a prompt can hold ({longest} tokens), which {config.algorithm.name} compares; raise it"
        )
