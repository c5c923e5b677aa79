"""What the policy is trained for, of one step: rewards, KL and entropy, means over all sequences of all ranks.

    objective/scores             the score: after the missing-EOS penalty, before normalising, clipping and the KL
    objective/entropy            sum_t -logprob_t, of the policy before the update
    objective/kl                 sum_t logprob_t - ref_logprob_t (k1); with a reference only
    objective/non_score_reward   -kl_coef * sum_t of the KL that was charged (Batch.reward_kl); 0 where none was
    objective/rlhf_reward        scores + non_score_reward
    objective/kl_per_token       mean over sequences of the mean over tokens of the charged KL: what an adaptive
                                 controller steers by; where a KL was charged only
    objective/kl_coef            the coefficient that was charged with; where a KL was charged only

t runs over written tokens; a sequence without any counts with 0. TRL's guide prints the non-score reward with the
opposite sign; its code, and this, add it.
"""

import torch

from megarl.algorithms import sequences
from megarl.algorithms.interface import SumOverRanks, identity
from megarl.types import Batch


def metrics(batch: Batch, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> dict[str, float]:
    """By the names above, of the batch that advantages() returned; of DAPO's with the loss_mask it had before.

    One call of sum_over_ranks.
    """

    def total(values: torch.Tensor) -> torch.Tensor:
        return sequences.written(values.double(), batch).sum()

    terms = {"scores": batch.scores.double().sum(), "entropy": -total(batch.logprobs)}
    if batch.ref_logprobs is not None:
        terms["kl"] = total(batch.logprobs) - total(batch.ref_logprobs)
    if batch.reward_kl is not None:
        charged = sequences.sums(batch.reward_kl.double(), batch)
        terms["charged"] = charged.sum()
        terms["kl_per_token"] = (charged / sequences.counts(batch).double().clamp(min=1)).sum()
    sums = sum_over_ranks(torch.stack(list(terms.values())))
    means = dict(zip(terms, (sums / batch.num_sequences).tolist(), strict=True))
    means["non_score_reward"] = -kl_coef * means.pop("charged", 0.0)
    means["rlhf_reward"] = means["scores"] + means["non_score_reward"]
    if batch.reward_kl is not None:
        means["kl_coef"] = kl_coef
    return {f"objective/{name}": value for name, value in means.items()}
