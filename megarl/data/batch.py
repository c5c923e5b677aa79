"""Packed batches: from rollouts, from supervised examples, and cut by sequences."""

from dataclasses import fields

import numpy as np
import torch

from megarl.types import Batch, Rollout

_SCORES = {"scores", "baseline_scores"}
_PER_SEQUENCE = {"index", "group_ids"} | _SCORES
_GLOBAL = {"num_groups", "num_sequences"}
_DERIVED = {"cu_seqlens"}
_PER_TOKEN = {f.name for f in fields(Batch)} - _PER_SEQUENCE - _GLOBAL - _DERIVED


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """cu_seqlens [B + 1] int32 of lengths [B]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def positions(lengths: torch.Tensor) -> torch.Tensor:
    """position_ids [N] int64, from 0 in each sequence."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts


def _packed(prompts: list[np.ndarray], answers: list[np.ndarray], dtype, prompt_fill) -> torch.Tensor:
    parts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        parts += [np.full(len(prompt), prompt_fill) if prompt_fill is not None else prompt, answer]
    return torch.from_numpy(np.concatenate(parts).astype(dtype))


def from_rollouts(rollouts: list[Rollout]) -> Batch:
    """The global batch of a step, on the CPU: the completions in order, group by group."""
    completions = [c for rollout in rollouts for c in rollout.completions]
    prompts = [r.prompt.token_ids for r in rollouts for _ in r.completions]
    group_ids = torch.tensor([g for g, r in enumerate(rollouts) for _ in r.completions])
    lengths = torch.tensor([len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)])
    baselines = [r.baseline.scores[0] for r in rollouts if r.baseline is not None for _ in r.completions]
    return Batch(
        tokens=_packed(prompts, [c.token_ids for c in completions], np.int64, None),
        position_ids=positions(lengths),
        cu_seqlens=cumulative(lengths),
        loss_mask=_packed(prompts, [c.loss_mask for c in completions], np.float32, 0),
        weight_version=_packed(prompts, [c.weight_version for c in completions], np.int64, -1),
        rollout_logprobs=_packed(prompts, [c.logprobs * c.loss_mask for c in completions], np.float32, 0),
        index=torch.arange(len(completions)),
        group_ids=group_ids,
        num_groups=len(rollouts),
        num_sequences=len(completions),
        scores=torch.from_numpy(np.concatenate([r.scores for r in rollouts]).astype(np.float32)),
        baseline_scores=torch.tensor(baselines, dtype=torch.float32) if baselines else None,
    )


def from_examples(examples: list[tuple[np.ndarray, np.ndarray]], index: list[int], num_sequences: int) -> Batch:
    """Supervised examples (prompt ids, answer ids), with the loss on the answer.

    Args:
        examples: this rank's share, at least one.
        index: the place of each in the global batch.
        num_sequences: examples in the global batch.
    """
    prompts, answers = [p for p, _ in examples], [a for _, a in examples]
    lengths = torch.tensor([len(p) + len(a) for p, a in examples])
    return Batch(
        tokens=_packed(prompts, answers, np.int64, None),
        position_ids=positions(lengths),
        cu_seqlens=cumulative(lengths),
        loss_mask=_packed(prompts, [np.ones(len(a)) for a in answers], np.float32, 0),
        weight_version=torch.full((int(lengths.sum()),), -1),
        index=torch.tensor(index),
        group_ids=torch.tensor(index),
        num_groups=num_sequences,
        num_sequences=num_sequences,
    )


def token_rows(batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Places in [N] of the tokens of some local sequences, sequence by sequence."""
    lengths = batch.lengths[rows]
    return batch.cu_seqlens[:-1][rows].long().repeat_interleave(lengths) + positions(lengths)


def select(batch: Batch, rows: torch.Tensor) -> Batch:
    """The packed batch of some local sequences (rows [b] int64), in that order."""
    at = token_rows(batch, rows)
    taken = {"cu_seqlens": cumulative(batch.lengths[rows])}
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if field.name in _PER_SEQUENCE and value is not None:
            taken[field.name] = value[rows]
        elif field.name in _PER_TOKEN and value is not None:
            taken[field.name] = value[at]
    return batch.with_(**taken)


def placeholder(batch: Batch) -> Batch:
    """One masked token with weight zero: what a rank without a share runs, so that it joins the collectives."""
    zero = torch.zeros(1, dtype=torch.int64)
    present = {name: getattr(batch, name) for name in _PER_TOKEN | _SCORES if getattr(batch, name) is not None}
    filled = {name: value.new_zeros(1, *value.shape[1:]) for name, value in present.items()}
    return batch.with_(
        **filled
        | dict(tokens=zero, position_ids=zero, weight_version=zero - 1, cu_seqlens=cumulative(zero + 1))
        | dict(index=zero, group_ids=zero)
    )


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    values = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    return batch.with_(**{n: v.to(device, non_blocking=True) for n, v in values.items() if isinstance(v, torch.Tensor)})
