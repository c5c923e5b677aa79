"""The hand-offs of a training step, one dataclass each; shapes in comments (DESIGN.md section 4).

`Prompt`, `Completion` and `Rollout` live in the rollout driver and hold numpy arrays and plain Python. `Batch` lives in
the trainer and holds torch tensors. `B` counts sequences, `N` packed tokens, `P` prompt tokens, `T` completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, ready to be sent to an engine.

    Example: Prompt(id=7, token_ids=np.array([3, 21, 22], np.int32), messages=[{"role": "user", "content": "07+45="}],
    ground_truth="052", data_source="arithmetic")
    """

    id: int  # position in its split, before any shuffle: stable over epochs and layouts
    token_ids: np.ndarray  # [P] int32, chat template applied
    messages: list[dict[str, Any]] | str  # what the dataset held: chat messages, or plain text
    ground_truth: Any = None
    data_source: str = ""
    columns: dict[str, Any] = field(default_factory=dict)  # the dataset's other columns, given to reward functions
    multi_modal: Any = None  # opaque; text-only for now


@dataclass(frozen=True)
class Completion:
    """One sampled answer, exactly as the engine produced it: ids and log-probs are never recomputed from text."""

    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, log-prob of each sampled token under the sampling distribution
    finish_reason: str  # "stop" (an end-of-sequence token, which is then the last of token_ids) or "length"
    loss_mask: np.ndarray  # [T] uint8; 0 on tool or observation tokens, which the policy did not write
    weight_version: np.ndarray  # [T] int32, the weights that sampled each token (0: the initial model)


@dataclass(frozen=True)
class Rollout:
    """A prompt, its n completions and what they were worth."""

    prompt: Prompt
    completions: list[Completion]  # n
    scores: np.ndarray  # [n] float64, weighted sum over the reward functions
    rewards: dict[str, np.ndarray]  # each reward function's own score, [n] float64, and "<function>/<extra key>"
    texts: list[str]  # n, decoded without special tokens; for reward functions and tables only
    events: dict[str, int] = field(default_factory=dict)  # "<function>/timeouts", ...: completions it failed on
    baseline: Rollout | None = None  # the greedy completion of the same prompt, for algorithms that ask for it


@dataclass(frozen=True)
class Batch:
    """Packed sequences of one data-parallel rank, and what the step has computed for them so far.

    Sequence b occupies tokens[cu_seqlens[b]:cu_seqlens[b + 1]], prompt first. Per-token quantities of the policy sit on
    the token they speak of: logprobs[i] is log p(tokens[i] | the tokens before it), defined where loss_mask is 1.
    """

    tokens: torch.Tensor  # [N] int64
    position_ids: torch.Tensor  # [N] int64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # [B + 1] int32
    loss_mask: torch.Tensor  # [N] float32, 1 on tokens that the policy wrote
    weight_version: torch.Tensor  # [N] int32, -1 on prompt tokens
    index: torch.Tensor  # [B] int64, the sequence's place in the global batch: the same in every layout
    group_ids: torch.Tensor  # [B] int64, which prompt of the global batch
    num_groups: int  # prompts in the global batch
    num_sequences: int  # sequences in the global batch
    scores: torch.Tensor | None = None  # [B] float32
    baseline_scores: torch.Tensor | None = None  # [B] float32, of the greedy completion of the same prompt (ReMax)
    rollout_logprobs: torch.Tensor | None = None  # [N] float32, the engine's; 0 where loss_mask is 0
    logprobs: torch.Tensor | None = None  # [N] float32, the policy's before the update ("old")
    ref_logprobs: torch.Tensor | None = None  # [N] float32
    ref_hidden: torch.Tensor | None = None  # [N, H] the reference's last hidden states, for the exact KL
    full_kl: torch.Tensor | None = None  # [N] float32, exact KL(policy before the update || reference) at each token
    values: torch.Tensor | None = None  # [N] float32, the critic's, before the update, of the state before the token
    reward_kl: torch.Tensor | None = None  # [N] float32, the KL that the reward was charged for, before its coefficient
    returns: torch.Tensor | None = None  # [N] float32, what the critic's values are to become
    advantages: torch.Tensor | None = None  # [N] float32
    token_weights: torch.Tensor | None = None  # [N] float32, of the mini-batch's loss; from global counts

    @property
    def lengths(self) -> torch.Tensor:
        """[B] int64, tokens per sequence, prompt included."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[N] int64, the local sequence (0..B-1) that each token belongs to."""
        return self.tokens.new_tensor(range(len(self.index))).repeat_interleave(self.lengths)

    def with_(self, **filled: Any) -> Batch:
        """A copy with some fields filled in: hand-offs are never mutated."""
        return replace(self, **filled)
