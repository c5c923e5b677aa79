"""The middle verbs of a training step: score the rollouts, run the models over the batch, update them on it."""

from collections.abc import Callable, Iterator

import torch

from megarl.algorithms import metrics as token_metrics
from megarl.algorithms.interface import Needs
from megarl.config.root import TrainConfig
from megarl.data import batch as batches
from megarl.parallel.collectives import max_over_ranks
from megarl.parallel.layout import Layout
from megarl.training import distribute as distribution
from megarl.training.roles import Roles
from megarl.types import Batch, Rollout


def score(rollouts: list[Rollout] | None, roles: Roles) -> list[Rollout] | None:
    """The rollouts with the scores of the reward model, where there is one. Collective."""
    return rollouts if roles.reward_model is None else roles.reward_model.score(rollouts)


def distribute(rollouts: list[Rollout] | None, layout: Layout, needs: Needs, config: TrainConfig, step: int) -> Batch:
    """This rank's share of rank 0's rollouts (None elsewhere), packed, balanced by tokens. Collective."""
    batch = None if rollouts is None else batches.from_rollouts(rollouts)
    size, seed = config.actor.ppo_mini_batch_size, config.trainer.seed
    return distribution.distribute(batch, layout, size, seed, step, config.rollout.n if needs.whole_groups else 1)


def with_statistics(
    batch: Batch, roles: Roles, needs: Needs, config: TrainConfig, step: int
) -> tuple[Batch, dict[str, float]]:
    """Fill `logprobs` (the policy before the update) and what the algorithm needs of reference and critic. Collective.

    Returns:
        the batch, and how far trainer and engine agree: "parity/max_abs_logprob", the largest difference between the
        engine's log-prob of a sampled token and the trainer's own under the same weights, over all ranks;
        "rollout/max_staleness", how many updates the weights behind the oldest token were behind.
    """
    actor, reference, critic = roles.actor, roles.reference, roles.critic
    max_tokens, exact = config.log_prob_max_token_len_per_gpu, needs.full_kl_in_reward or needs.full_kl_in_loss
    if reference is not None and exact:
        ref_logprobs, ref_hidden = reference.logprobs_and_hidden(batch, max_tokens)
        batch = batch.with_(ref_logprobs=ref_logprobs, ref_hidden=ref_hidden)
    elif reference is not None:
        batch = batch.with_(ref_logprobs=reference.logprobs(batch, max_tokens)[0])
    found = actor.statistics(batch, max_tokens, reference if needs.full_kl_in_reward else None)
    batch = batch.with_(logprobs=found["logprobs"], full_kl=found.get("full_kl"))
    if not needs.full_kl_in_loss:
        batch = batch.with_(ref_hidden=None)
    if critic is not None:
        batch = batch.with_(values=critic.values(batch, 2 * config.critic_max_token_len_per_gpu))
    gap = ((batch.logprobs - batch.rollout_logprobs) * batch.loss_mask).abs().max()
    behind = ((step - 1 - batch.weight_version) * batch.loss_mask).max()
    agreement = {
        "parity/max_abs_logprob": float(max_over_ranks(gap)),
        "rollout/max_staleness": float(max_over_ranks(behind)),
    }
    return batch, agreement


def update(batch: Batch, roles: Roles, algorithm, needs: Needs, config: TrainConfig, step: int) -> dict[str, float]:
    """Passes over the batch, one optimizer step per mini-batch: the critic's, then the actor's. Collective.

    The actor waits for `trainer.critic_warmup` steps.
    """
    metrics: dict[str, float] = {}
    if roles.critic is not None:
        metrics |= update_critic(batch, roles, config, step)
    if step > config.trainer.critic_warmup:
        metrics |= update_actor(batch, roles, algorithm, needs, config, step)
    return metrics


def update_critic(batch: Batch, roles: Roles, config: TrainConfig, step: int) -> dict[str, float]:
    """Returns means over tokens of all mini-batches; of "loss/value_avg" and "critic/grad_norm" over mini-batches."""
    critic, max_tokens = roles.critic, config.critic_max_token_len_per_gpu
    parts = _parts(batch, config.critic_mini_batch_size, config.critic_epochs, config.trainer.seed, step)
    found = _averaged([critic.update(mine, max_tokens) for mine in parts])
    return {
        "loss/value_avg": found.pop("loss"),
        "critic/grad_norm": found.pop("grad_norm"),
        "critic/lr": found.pop("lr"),
    } | found


def update_actor(
    batch: Batch, roles: Roles, algorithm, needs: Needs, config: TrainConfig, step: int
) -> dict[str, float]:
    """Returns means over the tokens of all mini-batches; "loss/policy_avg", "policy/grad_norm": over the mini-batches;
    "lr" the last one.
    """
    actor, settings = roles.actor, config.algorithm
    reference = roles.reference if needs.full_kl_in_loss else None

    def token_loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Batch, full_kl: torch.Tensor | None = None):
        return algorithm.token_loss(logprobs, entropy, micro, settings, full_kl)

    def update_on(mine: Batch) -> dict[str, float]:
        mine = mine.with_(token_weights=algorithm.weights(mine, settings, actor.sum_over_dp))
        max_tokens = config.actor.ppo_max_token_len_per_gpu
        return actor.update(mine, token_loss, max_tokens, reference, needs.whole_groups, needs.per_token_loss)

    together = config.rollout.n if needs.whole_groups else 1
    epochs, size = config.actor.ppo_epochs, config.actor.ppo_mini_batch_size
    found = _averaged([update_on(mine) for mine in _parts(batch, size, epochs, config.trainer.seed, step, together)])
    found["loss/policy_avg"] = found.pop("loss")
    found["policy/grad_norm"] = found.pop("grad_norm")
    return token_metrics.finished(found)


def _parts(batch: Batch, size: int, epochs: int, seed: int, step: int, together: int = 1) -> Iterator[Batch]:
    """This rank's part of each mini-batch of each pass."""
    for epoch in range(epochs):
        for chunk in distribution.mini_batches(batch.num_sequences, size, seed, step, epoch, together):
            rows = torch.nonzero(torch.isin(batch.index, chunk)).squeeze(1)
            yield batches.select(batch, rows) if len(rows) else batches.placeholder(batch)


def _averaged(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over mini-batches, of "loss" and "grad_norm"; over their tokens, of all others; the last "lr"."""

    def mean(name: str, weight: Callable[[dict[str, float]], float]) -> float:
        return sum(weight(one) * one[name] for one in found) / max(sum(map(weight, found)), 1.0)

    names = found[0].keys() - {"tokens", "lr", "loss", "grad_norm"}
    means = {name: mean(name, lambda one: one["tokens"]) for name in sorted(names)}
    return means | {name: mean(name, lambda one: 1.0) for name in ("loss", "grad_norm")} | {"lr": found[-1]["lr"]}
