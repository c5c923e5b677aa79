"""Online DPO: of two fresh completions of a prompt the better one is preferred (Guo et al., arXiv 2402.04792).

With h = sum_t (logprob_t - ref_logprob_t) of each completion, the loss of a pair is

    sigmoid    -log sigmoid(beta (h_chosen - h_rejected))                    DPO, arXiv 2305.18290, eq. 7
    ipo        (h_chosen - h_rejected - 1 / (2 beta))^2                      IPO, arXiv 2310.12036, eq. 17

averaged over pairs. The completion with the higher score is chosen; of two equal ones the first.

Hand-off: advantages() puts +beta on the written tokens of the chosen completion and -beta on those of the rejected one,
so beta (h_chosen - h_rejected) = sum over the pair's tokens of A_t (logprob_t - ref_logprob_t). A pair's loss stands on
all of its tokens, which share its weight. beta is the KL coefficient of DPO's objective, and comes as one: kl_coef.

Assumptions, and what is done where systems differ:
- h is a sum over tokens, not a mean (TRL's ipo in its offline trainer is a mean). No label smoothing.
- beta may be a list, one value for each pass over the prompts, the last for all later ones (TRL).
- A pair without any written token counts in no mean. Scores are compared as they are: a missing end of sequence has
  already been charged.
- Batch.reward_kl is k1's, so that objective/non_score_reward is -beta * KL (TRL).
"""

from typing import Literal

import torch
from pydantic import field_validator

from megarl.algorithms import kl_control, policy_ratio, sequences
from megarl.algorithms.interface import Needs, SumOverRanks, identity
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import key
from megarl.types import Batch


class Config(AlgorithmConfig):
    name: Literal["online_dpo"] = key("online_dpo", "Direct preference optimisation on fresh pairs.")
    beta: float | list[float] = key(0.1, "How close to the reference the policy stays; a list: one value per epoch.")
    loss_type: Literal["sigmoid", "ipo"] = key("sigmoid", "The loss of a pair: sigmoid (DPO) or ipo.")

    @field_validator("beta")
    @classmethod
    def _above_zero(cls, beta: float | list[float]) -> float | list[float]:
        values = beta if isinstance(beta, list) else [beta]
        if not values or min(values) <= 0:
            raise ValueError(f"beta={beta} must be greater than 0; a list holds one such value for each epoch")
        return beta

    def check_group_size(self, n: int) -> None:
        if n != 2:
            raise ValueError(f"rollout.n={n}: online_dpo compares 2 completions of each prompt; set rollout.n=2")

    def kl_controller(self) -> kl_control.KLController:
        """The course of beta."""
        return kl_control.PerEpoch(self.beta if isinstance(self.beta, list) else [self.beta])


def needs(config: Config) -> Needs:
    return Needs(reference=True, whole_groups=True)


def advantages(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity, kl_coef: float = 0.0) -> Batch:
    """Fill batch.advantages [N]: +kl_coef (the present beta) on chosen, -kl_coef on rejected tokens; and reward_kl [N].

    Groups must be whole on this rank. No global sums.
    """
    assert kl_coef > 0, "beta comes from Config.kl_controller()"
    second = torch.zeros(batch.num_groups, dtype=torch.int64, device=batch.index.device)
    second = second.scatter_reduce(0, batch.group_ids, batch.index, "amax", include_self=False)[batch.group_ids]
    is_second = batch.index == second
    margin = torch.where(is_second, -batch.scores, batch.scores).double()
    margins = margin.new_zeros(batch.num_groups).index_add(0, batch.group_ids, margin)[batch.group_ids]
    chosen = (margins >= 0) ^ is_second
    signs = kl_coef * (2 * chosen.to(batch.loss_mask.dtype) - 1)
    reward_kl = sequences.written(batch.logprobs, batch) - sequences.written(batch.ref_logprobs, batch)
    return batch.with_(advantages=sequences.spread(signs, batch), reward_kl=reward_kl)


def _pair_sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[num_groups] sums of values [N] over the written tokens of each pair."""
    return values.new_zeros(batch.num_groups).index_add(0, batch.group_ids, sequences.sums(values, batch))


def weights(batch: Batch, config: Config, sum_over_ranks: SumOverRanks = identity) -> torch.Tensor:
    """[N] token weights of one mini-batch: each pair 1 / pairs, shared by its written tokens. One global sum."""
    tokens = _pair_sums(torch.ones_like(batch.loss_mask), batch).double()
    pairs = sum_over_ranks((tokens > 0).double().sum())
    shares = (1.0 / (pairs * tokens))[batch.group_ids[batch.sequence_ids]]
    return sequences.written(shares, batch).to(batch.loss_mask.dtype)


def token_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    config: Config,
    full_kl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics {name: [N]}) of the current policy's log-probs [N]; pairs are whole in the batch.

    Metrics of pairs (see metrics.py): logps/chosen and /rejected, sums of log-probs; rewards/chosen and /rejected,
    beta * h; rewards/margins, their difference; rewards/accuracies, margin > 0; objective/scores_margin; beta.
    """
    h = sequences.written(logprobs, batch) - sequences.written(batch.ref_logprobs, batch)
    margins = _pair_sums(batch.advantages * h, batch)
    tokens = _pair_sums(torch.ones_like(batch.loss_mask), batch)
    assert torch.bincount(batch.group_ids)[torch.nonzero(tokens)].eq(2).all(), "a pair is cut by a micro-batch"
    beta = torch.where(tokens > 0, _pair_sums(batch.advantages.abs(), batch) / tokens, 1.0)
    if config.loss_type == "sigmoid":
        losses = -torch.nn.functional.logsigmoid(margins)
    else:
        losses = ((margins - 0.5) / beta).square()  # h_chosen - h_rejected - 1 / (2 beta)
    loss = sequences.written(losses[batch.group_ids[batch.sequence_ids]], batch)

    chosen = (batch.advantages > 0).to(h.dtype)
    scores = batch.scores.new_zeros(batch.num_groups)
    highest = scores.scatter_reduce(0, batch.group_ids, batch.scores, "amax", include_self=False)
    of_pairs = {
        "pairs": torch.ones_like(margins),
        "pairs:logps/chosen": _pair_sums(chosen * logprobs, batch),
        "pairs:logps/rejected": _pair_sums((1 - chosen) * logprobs, batch),
        "pairs:rewards/chosen": _pair_sums(chosen * batch.advantages * h, batch),
        "pairs:rewards/rejected": _pair_sums((chosen - 1) * batch.advantages * h, batch),
        "pairs:rewards/margins": margins,
        "pairs:rewards/accuracies": (margins > 0).to(margins.dtype),
        "pairs:objective/scores_margin": 2 * highest - scores.index_add(0, batch.group_ids, batch.scores),
        "pairs:beta": beta,
    }
    metrics = {
        "policy/approxkl_avg": 0.5 * policy_ratio.log_ratios(logprobs, batch).square(),
        "policy/entropy_avg": sequences.written(entropy, batch),
    } | {name: _on_last_token(values, batch) for name, values in of_pairs.items()}
    return loss, {name: values.detach() for name, values in metrics.items()}


def _on_last_token(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] each pair's value [num_groups] on its last written token, 0 elsewhere."""
    at = torch.nonzero(batch.loss_mask > 0).squeeze(1)
    pair = batch.group_ids[batch.sequence_ids[at]]
    last = at.new_zeros(batch.num_groups).scatter_reduce(0, pair, at, "amax", include_self=False)
    present = pair.unique()
    return values.new_zeros(len(batch.tokens)).index_copy(0, last[present], values[present])
