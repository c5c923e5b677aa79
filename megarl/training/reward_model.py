"""A learned reward: a sequence classifier with one label, its scores of rollouts, its learning from preferences."""

from dataclasses import replace

import numpy as np
import torch

from megarl.config.model import ModelConfig, OptimConfig
from megarl.data import batch as batches
from megarl.data.tokenizer import load_tokenizer
from megarl.models import hf_files
from megarl.parallel.layout import Layout
from megarl.rewards.templates import reward_model_ids
from megarl.training.distribute import distribute
from megarl.training.megatron_model import MegatronModel, weighted
from megarl.types import Batch, Rollout

PART = "reward_model"  # the name of its scores in Rollout.rewards


class RewardModel(MegatronModel):
    """A transformer with a score head on all ranks: a sequence's score is the value at its last token, as in
    transformers' `...ForSequenceClassification`. Every method is collective; a batch is the rank's own share.
    """

    def __init__(self, model: ModelConfig, layout: Layout, optim: OptimConfig | None = None, optimizer_steps: int = 0):
        """Load a checkpoint; arguments and errors as for MegatronModel. A frozen one must have a score head.

        Raises:
            ValueError: also where the checkpoint has no `score.weight`, and there is no optimizer to learn one.
        """
        if optim is None:
            hf_files.check_reward_model(model.path)
        super().__init__(model, layout, optim, optimizer_steps, value_head=True)

    def scores(self, batch: Batch, max_tokens: int) -> torch.Tensor:
        """[B] fp32: the score of each of the share's sequences."""
        found = self._map(batch, max_tokens, lambda values, micro: {"values": values[:, 0]})
        return found["values"][batch.cu_seqlens[1:].long() - 1]

    def update(self, batch: Batch, max_tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch of `pairs`: the mean over pairs of -log sigmoid(chosen - rejected).

        (Bradley-Terry; Ouyang et al., arXiv 2203.02155, eq. 1.)

        Returns:
            "loss"; "accuracy", the share of pairs whose chosen answer scores higher; "margin", the mean of chosen -
            rejected; "tokens"; "grad_norm" and "lr".

        Raises:
            MegarlError: the gradient is not finite.
        """

        def output_loss(values, micro):
            loss, metrics = pair_loss(values, micro)
            return weighted(loss, micro), metrics

        weights = batch.loss_mask / batch.num_sequences
        metrics = self._gradients(batch.with_(token_weights=weights), output_loss, max_tokens, whole_groups=True)
        return self._step(metrics)


def pairs(examples: list[tuple[np.ndarray, np.ndarray]], index: list[int], num_pairs: int) -> Batch:
    """Preferences (chosen ids, rejected ids), [T] int32 each with T >= 1, as groups of two; loss_mask is 1 on the last
    token of each, where its score is.

    Args:
        examples: this rank's share, at least one.
        index: the place of each in the global batch.
        num_pairs: in the global batch.
    """
    sequences = [(ids[:-1], ids[-1:]) for pair in examples for ids in pair]
    batch = batches.from_examples(sequences, [2 * i + side for i in index for side in (0, 1)], 2 * num_pairs)
    return batch.with_(group_ids=batch.index // 2, num_groups=num_pairs)


def pair_loss(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics) of values [N, 1] of whole `pairs`: each pair's on both of its last tokens, 0 elsewhere."""
    signs = batch.loss_mask * (1 - 2 * (batch.index % 2)[batch.sequence_ids])
    pair_of = batch.group_ids[batch.sequence_ids]
    margins = values.new_zeros(batch.num_groups).index_add(0, pair_of, signs * values[:, 0])[pair_of]
    loss = -torch.nn.functional.logsigmoid(margins) * batch.loss_mask
    return loss, {"accuracy": (margins > 0).to(values.dtype), "margin": margins}


class RewardScorer:
    """Scores rollouts with a reward model that has its own tokenizer and chat template."""

    def __init__(self, model: RewardModel, weight: float, max_length: int, truncation: str, max_tokens: int):
        """
        Args:
            model: a frozen reward model.
            weight: its scores are added to those of the reward functions times this.
            max_length, truncation: see `reward_model_ids`.
            max_tokens: tokens per micro-batch; changes memory and speed only.
        """
        self._model, self._weight, self._max_tokens = model, weight, max_tokens
        self._max_length, self._truncation = max_length, truncation
        self._tokenizer = load_tokenizer(model.source)

    def score(self, rollouts: list[Rollout] | None) -> list[Rollout] | None:
        """Rank 0's rollouts with the model's scores in `rewards` and, weighted, in `scores`; baselines too. Collective;
        other ranks pass None and get None.
        """
        every = [r for rollout in rollouts or [] for r in (rollout, rollout.baseline) if r is not None]
        batch = None if rollouts is None else self._batch(every)
        share = distribute(batch, self._model.layout, mini_batch_size=None, seed=0, step=0)
        scores = torch.zeros(share.num_sequences)
        scores[share.index] = self._model.scores(share, self._max_tokens)
        left = iter(self._model.sum_over_dp(scores).double().numpy())
        if rollouts is None:
            return None

        def scored(rollout: Rollout | None) -> Rollout | None:
            if rollout is None:
                return None
            own = np.array([next(left) for _ in rollout.texts])
            return replace(rollout, scores=rollout.scores + self._weight * own, rewards=rollout.rewards | {PART: own})

        return [replace(scored(rollout), baseline=scored(rollout.baseline)) for rollout in rollouts]

    def _batch(self, rollouts: list[Rollout]) -> Batch:
        sequences = [
            reward_model_ids(self._tokenizer, rollout.prompt.messages, text, self._max_length, self._truncation)
            for rollout in rollouts
            for text in rollout.texts
        ]
        nothing = np.zeros(0, np.int32)
        batch = batches.from_examples([(ids, nothing) for ids in sequences], range(len(sequences)), len(sequences))
        return batch.with_(scores=torch.zeros(len(sequences)), rollout_logprobs=torch.zeros(len(batch.tokens)))
