"""Written tokens of a packed batch: sums over each sequence, the last one, and response-aligned [B, T] views.

A token is *written* where loss_mask is 1: the policy chose it. Prompt tokens, and the tool or observation tokens of a
multi-turn response, are not.
"""

import torch

from megarl.types import Batch


def written(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """values [N], 0 on tokens that were not written, whatever stands there: inf and nan do not pass, nor a gradient."""
    return torch.where(batch.loss_mask > 0, values, 0.0)


def sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B] the sum of values [N] over each sequence's written tokens; 0 for a sequence without any."""
    zeros = values.new_zeros(len(batch.index))
    return zeros.index_add(0, batch.sequence_ids, written(values, batch))


def counts(batch: Batch) -> torch.Tensor:
    """[B] written tokens of each sequence, in loss_mask's dtype."""
    return sums(torch.ones_like(batch.loss_mask), batch)


def spread(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] each sequence's value [B] on all of its written tokens, 0 elsewhere."""
    return written(values[batch.sequence_ids], batch)


def on_last_token(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] each sequence's value [B] on its last written token, 0 elsewhere; lost where a sequence has none."""
    at = torch.nonzero(batch.loss_mask > 0).squeeze(1)
    row = batch.sequence_ids[at]
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    return values.new_zeros(len(batch.tokens)).index_copy(0, at[last], values[row[last]])


class Responses:
    """The written tokens of each sequence side by side, left-aligned in [B, T] and padded with zeros.

    What stands between two written tokens is left out, so that the next written token is the next column.
    """

    def __init__(self, batch: Batch):
        self.at = torch.nonzero(batch.loss_mask > 0).squeeze(1)
        self.row = batch.sequence_ids[self.at]
        lengths = torch.bincount(self.row, minlength=len(batch.index))
        self.column = torch.arange(len(self.at), device=self.at.device) - (lengths.cumsum(0) - lengths)[self.row]
        self.shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
        self.num_tokens = len(batch.tokens)

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        """[B, T] of values [N]."""
        out = values.new_zeros(self.shape)
        out[self.row, self.column] = values[self.at]
        return out

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """[N] of values [B, T]; 0 on tokens that were not written."""
        return values.new_zeros(self.num_tokens).index_copy(0, self.at, values[self.row, self.column])
