"""The two middle verbs of a training step: score the batch with the models, then update the policy on it."""

import torch

from megarl.config.root import TrainConfig
from megarl.data import batch as batches
from megarl.parallel.collectives import max_over_ranks
from megarl.training.distribute import mini_batches
from megarl.training.policy import Policy
from megarl.types import Batch


def with_logprobs(
    batch: Batch, actor: Policy, reference: Policy | None, config: TrainConfig, step: int
) -> tuple[Batch, dict[str, float]]:
    """Fill `logprobs` (the policy before the update) and, with a reference, `ref_logprobs`. Collective.

    Returns:
        the batch, and how far trainer and engine agree: "parity/max_abs_logprob", the largest difference between the
        engine's log-prob of a sampled token and the trainer's own under the same weights, over all ranks;
        "rollout/max_staleness", how many updates the weights behind the oldest token were behind.
    """
    max_tokens = config.log_prob_max_token_len_per_gpu
    logprobs, _ = actor.logprobs(batch, max_tokens)
    ref_logprobs = reference.logprobs(batch, max_tokens)[0] if reference is not None else None
    gap = ((logprobs - batch.rollout_logprobs) * batch.loss_mask).abs().max()
    behind = ((step - 1 - batch.weight_version) * batch.loss_mask).max()
    agreement = {
        "parity/max_abs_logprob": float(max_over_ranks(gap)),
        "rollout/max_staleness": float(max_over_ranks(behind)),
    }
    return batch.with_(logprobs=logprobs, ref_logprobs=ref_logprobs), agreement


def update(batch: Batch, actor: Policy, algorithm, config: TrainConfig, step: int) -> dict[str, float]:
    """`ppo_epochs` passes over the batch, one optimizer step per mini-batch. Collective.

    Returns:
        the metrics of the mini-batches, averaged; "loss/policy_avg" is the mean of their losses, "lr" the last one.
    """
    settings = config.algorithm

    def token_loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Batch):
        return algorithm.token_loss(logprobs, entropy, micro, settings)

    found: list[dict[str, float]] = []
    for epoch in range(config.actor.ppo_epochs):
        for chunk in mini_batches(
            batch.num_sequences, config.actor.ppo_mini_batch_size, config.trainer.seed, step, epoch
        ):
            rows = torch.nonzero(torch.isin(batch.index, chunk)).squeeze(1)
            mine = batches.select(batch, rows) if len(rows) else batches.placeholder(batch)
            mine = mine.with_(token_weights=algorithm.weights(mine, settings, actor.sum_over_dp))
            found.append(actor.update(mine, token_loss, config.actor.ppo_max_token_len_per_gpu))
    metrics = {name: sum(m[name] for m in found) / len(found) for name in found[0]}
    metrics["loss/policy_avg"] = metrics.pop("loss")
    metrics["policy/grad_norm"] = metrics.pop("grad_norm")
    metrics["lr"] = found[-1]["lr"]
    return metrics
