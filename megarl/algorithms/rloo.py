"""RLOO: the mean of the other completions of a prompt is the baseline (Ahmadian et al., arXiv 2402.14740).

For completion b among the k of its prompt, one completion being one action:

    R_b = score_b - kl_coef * sum_t kl_t                                      (the KL with use_kl_in_reward)
    A_b = R_b - mean of the other k - 1 R
    w_b = exp(sum_t (logprob_t - old logprob_t))
    L_b = -min(w_b A_b, clip(w_b, 1 - clip_ratio_low, 1 + clip_ratio_high) A_b),  mean over completions

Example: rewards 1, 2, 5, 8 of one prompt: A of the first = 1 - (2 + 5 + 8) / 3 = -4.

token_level_kl=true makes each token an action: r_t = score * 1[t is the last written token] - kl_coef * kl_t, and

    A_t = r_t + r_{t+1} + ... - mean of the other k - 1 R,      L_t with the token's own ratio, summed over tokens

At w = 1 both have the same gradient but for the KL: a token does not answer for the KL of those before it. (In TRL the
key changes nothing: both branches give the same number.)

Assumptions, and what is done where systems differ:
- The KL is charged before the baseline (the guide, TRL); OpenRLHF charges it token by token after it.
- A completion without siblings has advantage 0 (verl's vectorised form, NeMo-RL); verl's loop keeps its reward.
- normalize_advantage: mean 0 and standard deviation 1 (unbiased, epsilon 1e-8 on the variance) over all completions,
  or over all written tokens with token_level_kl. TRL 1.16 adds 1e-4 to the standard deviation.
- No dual clip. The log-ratio is clamped to [-20, 20]. KL and entropy terms of the loss are means over each
  completion's tokens (sums with token_level_kl).
"""

from typing import Literal

import torch
from pydantic import model_validator

from megarl.algorithms import aggregation, gae, groups, policy_loss, policy_ratio, reward_shaping, sequences, whitening
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.base import key
from megarl.types import Batch


class Config(policy_loss.PolicyLossConfig, policy_ratio.ClipConfig, reward_shaping.RewardShapingConfig):
    name: Literal["rloo"] = key("rloo", "REINFORCE leave-one-out.")
    normalize_advantage: bool = key(False, "Give the advantages of a step mean 0 and standard deviation 1.")
    token_level_kl: bool = key(False, "Each token is an action and is charged its own KL, instead of each completion.")

    def check_group_size(self, n: int) -> None:
        if n < 2:
            raise ValueError(f"rollout.n={n} (rloo_k) leaves no other completion to be the baseline; use at least 2")

    @model_validator(mode="after")
    def _one_weight_for_one_action(self):
        if self.rollout_correction.rollout_is == "token" and not self.token_level_kl:
            raise ValueError(
                "rollout_correction.rollout_is=token weighs tokens, and rloo's action is the whole completion; use "
                "sequence, or token_level_kl=true"
            )
        return self


def needs(config: Config) -> Needs:
    return policy_loss.needs(config, per_token_loss=config.token_level_kl)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]; 0 on tokens that were not written.

    One call of sum_over_ranks, and two more for each of normalize_reward, whiten_rewards and normalize_advantage.
    """
    batch = reward_shaping.charge_kl(batch, config)
    scores = reward_shaping.shaped_scores(batch, config, sum_over_ranks)
    if config.token_level_kl:
        rewards, mask = reward_shaping.token_rewards(batch, scores, kl_coef), batch.loss_mask
    else:
        rewards = reward_shaping.sequence_rewards(batch, scores, kl_coef)
        mask = torch.ones_like(rewards)
    if config.whiten_rewards:
        rewards = whitening.whiten(rewards, mask, sum_over_ranks, shift_mean=False)
    if config.token_level_kl:
        baseline = groups.others_mean(sequences.sums(rewards, batch), batch, sum_over_ranks)
        advantages = gae.reward_to_go(rewards, batch) - sequences.spread(baseline, batch)
    else:
        advantages = rewards - groups.others_mean(rewards, batch, sum_over_ranks)
    if config.normalize_advantage:
        advantages = whitening.whiten(advantages, mask, sum_over_ranks)
    if not config.token_level_kl:
        advantages = sequences.spread(advantages, batch)
    return batch.with_(advantages=advantages.to(batch.loss_mask.dtype))


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] token weights of one mini-batch: each sequence 1 / S, on each of its tokens or shared by them."""
    mode = "seq-mean-token-sum" if config.token_level_kl else "seq-mean-token-mean"
    return aggregation.token_weights(batch, mode, sum_over_ranks=sum_over_ranks)


def token_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    config: Config,
    full_kl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N] and entropy [N]; sequences are whole."""
    log_ratios = policy_ratio.log_ratios(logprobs, batch)
    if not config.token_level_kl:
        log_ratios = sequences.spread(sequences.sums(log_ratios, batch), batch)
    ratio = policy_ratio.ratios(log_ratios)
    loss, metrics = policy_ratio.clipped_loss(ratio, batch, config.clip_ratio_low, config.clip_ratio_high)
    return policy_loss.finish(loss, metrics, logprobs, entropy, batch, config, full_kl)
