"""From scores to rewards: normalise, clip, charge the KL, whiten; in this order.

The score of a sequence [B] is what its reward functions gave (a missing end-of-sequence token is already charged).

    s <- (s - mean) / (std + 1e-8)              normalize_reward, over the whole batch, std unbiased
    s <- clip(s, -c, c)                         reward_clip_range; independent of normalize_reward when it is set. Unset
                                                it is 10 with normalize_reward and no clip without (TRL's default and
                                                effect; TRL ignores the key where it does not normalise)
    sequence:  R = s - kl_coef * sum_t kl_t
    token:     r_t = s * 1[t is the last written token] - kl_coef * kl_t           (Ouyang et al., arXiv 2203.02155)

kl_t is Batch.reward_kl, that of the policy before the update. The score of a sequence without a written token stays in
the batch's statistics; there is no token to reward.
"""

import torch

from megarl.algorithms import kl, sequences, whitening
from megarl.algorithms.interface import SumOverRanks, identity
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch


class RewardShapingConfig(AlgorithmConfig):
    normalize_reward: bool = key(False, "Give the scores of a step mean 0 and standard deviation 1.")
    reward_clip_range: float | None = key(
        None, "Clip scores to [-range, range]. Unset: 10 with normalize_reward, else no clip.", gt=0
    )
    whiten_rewards: bool = key(
        False, "Divide the rewards (KL charged) of a step by their standard deviation; their mean stays."
    )


def shaped_scores(batch: Batch, config: RewardShapingConfig, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[B] float64 scores, normalised and clipped. Two calls of sum_over_ranks with normalize_reward, else none."""
    scores, limit = batch.scores.double(), config.reward_clip_range
    if config.normalize_reward:
        mean, variance = whitening.moments(scores, torch.ones_like(scores), sum_over_ranks)
        scores = (scores - mean) / (variance.sqrt() + 1e-8)
        limit = limit or 10.0
    return scores if limit is None else scores.clamp(-limit, limit)


def charge_kl(batch: Batch, config: kl.KLConfig) -> Batch:
    """The batch with reward_kl [N] filled; itself where no KL is charged in the reward."""
    if not config.charges_reward:
        return batch
    return batch.with_(reward_kl=kl.to_reference(batch.logprobs, batch, config.kl_penalty, batch.full_kl))


def sequence_rewards(batch: Batch, scores: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """[B] float64 scores [B], less kl_coef times each sequence's sum of reward_kl."""
    if batch.reward_kl is None:
        return scores.double()
    return scores.double() - kl_coef * sequences.sums(batch.reward_kl.double(), batch)


def token_rewards(batch: Batch, scores: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """[N] float64: scores [B] on the last written tokens, less kl_coef times reward_kl on each."""
    rewards = sequences.on_last_token(scores.double(), batch)
    return rewards if batch.reward_kl is None else rewards - kl_coef * batch.reward_kl.double()
