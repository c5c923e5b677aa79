"""What is done to a completion and its score whatever the reward functions say; pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from megarl.types import Completion


def truncated(completion: Completion, stop_token_ids: Collection[int]) -> Completion:
    """The completion up to and with its first stop token, which then ends it (finish_reason "stop").

    TRL's `truncate_response`, with the tokens behind it left out instead of replaced by padding, so that an id of 0
    is a stop token like any other. Without a stop token in it, the completion as it is.
    """
    places = np.flatnonzero(np.isin(completion.token_ids, list(stop_token_ids)))
    if len(places) == 0:
        return completion
    end = int(places[0]) + 1
    return replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        loss_mask=completion.loss_mask[:end],
        weight_version=completion.weight_version[:end],
        finish_reason="stop",
    )


def missing_eos(finish_reasons: Sequence[str], penalty: float) -> np.ndarray:
    """-penalty where no end-of-sequence or stop token ended the completion, else 0; [n] float64.

    TRL's `missing_eos_penalty`; there only the tokenizer's end-of-sequence token counts, so that with another
    `stop_token_id` every completion loses the same.
    """
    return np.array([0.0 if reason == "stop" else -penalty for reason in finish_reasons])


def soft_overlong(lengths: Sequence[int], limit: int, buffer: int, factor: float) -> np.ndarray:
    """DAPO's soft overlong punishment (Yu et al. 2025, equation 13) times `factor`; [n] float64.

    0 for at most `limit - buffer` tokens, then falling linearly to -factor at `limit` tokens, and -factor beyond; 0
    everywhere for a buffer of 0.

    Args:
        lengths: completion tokens, [n].
        limit: L_max, the longest completion there can be.
        buffer: L_cache, the last so many tokens below it.
    """
    if buffer == 0:
        return np.zeros(len(lengths))
    over = np.asarray(lengths, np.float64) - (limit - buffer)
    return 0.0 - factor * np.clip(over / buffer, 0.0, 1.0)
