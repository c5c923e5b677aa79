"""Loss aggregation as one weight per token, from counts of the whole mini-batch.

A token-separable loss is then sum_i weight_i * loss_i over all tokens of all ranks: the sum does not see where packing,
micro-batches or data parallelism cut the batch. With T tokens whose loss_mask is 1, S sequences that have at least one
of them, and n_b of them in sequence b, a masked-in token of sequence b weighs

    token-mean                 1 / T                every token counts the same (DAPO, arXiv 2503.14476)
    seq-mean-token-sum         1 / S                long sequences count more
    seq-mean-token-mean        1 / (S n_b)          every sequence counts the same (GRPO, arXiv 2402.03300)
    seq-mean-token-sum-norm    1 / (S horizon)      a fixed length instead of n_b (Dr. GRPO, arXiv 2503.20783)

and a masked-out one 0. T and S count over all ranks. Sequences without a masked-in token (an empty completion) do not
count in S, as in verl 0.9.1; TRL divides by all sequences.
"""

from typing import Literal

import torch
from pydantic import model_validator

from megarl.algorithms import sequences
from megarl.algorithms.interface import SumOverRanks, identity
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class AggregationConfig(AlgorithmConfig):
    loss_agg_mode: LossAggMode = key(
        "token-mean",
        "How token losses become one number: token-mean, seq-mean-token-sum, seq-mean-token-mean (GRPO's paper), or "
        "seq-mean-token-sum-norm (a fixed length), over the whole mini-batch.",
    )
    loss_scale_factor: float | None = key(
        None, "Tokens that seq-mean-token-sum-norm divides a sequence's sum by, e.g. data.max_response_length.", gt=0
    )

    @model_validator(mode="after")
    def _horizon_fits_the_mode(self):
        needs_horizon = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if needs_horizon and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor, the length in tokens that it divides "
                "by (usually data.max_response_length)"
            )
        if not needs_horizon and self.loss_scale_factor is not None:
            raise ValueError(
                f"loss_scale_factor={self.loss_scale_factor:g} has no meaning with loss_agg_mode={self.loss_agg_mode}; "
                "remove it, or set loss_agg_mode=seq-mean-token-sum-norm"
            )
        return self


def token_weights(
    batch: Batch, mode: LossAggMode, horizon: float | None = None, sum_over_ranks: SumOverRanks = identity
) -> torch.Tensor:
    """[N] weights of this rank's part of a mini-batch, in loss_mask's dtype. One call of sum_over_ranks, of two counts.

    batch: uses loss_mask, cu_seqlens and index. horizon: tokens, > 0; for seq-mean-token-sum-norm only.
    A mini-batch without any masked-in token has weights 0. Raises ValueError for an unknown mode or a missing horizon.
    """
    mask = batch.loss_mask.double()
    lengths = sequences.counts(batch).double()
    num_tokens, num_sequences = sum_over_ranks(torch.stack([lengths.sum(), (lengths > 0).double().sum()]))
    if mode == "token-mean":
        denominator = num_tokens
    elif mode == "seq-mean-token-sum":
        denominator = num_sequences
    elif mode == "seq-mean-token-mean":
        denominator = num_sequences * lengths[batch.sequence_ids]
    elif mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError(
                "seq-mean-token-sum-norm needs a horizon: the length in tokens that a sequence is divided by"
            )
        denominator = num_sequences * horizon
    else:
        raise ValueError(f"loss aggregation mode {mode!r} is not one of {', '.join(LossAggMode.__args__)}")
    return torch.where(mask > 0, mask / denominator, 0.0).to(batch.loss_mask.dtype)
