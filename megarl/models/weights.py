"""The words in which a family's file says how checkpoint tensors lie in Megatron's: data, read by `resharding`.

`{i}` in a name stands for the layer, `{e}` for the expert: in a checkpoint's names counted over the whole model, in
Megatron's over what the rank holds. Checkpoint names and shapes are those of the Hugging Face files.

A Megatron name may be a pair, one for each of `SPELLINGS`; a model uses the same one everywhere.
"""

from dataclasses import dataclass
from typing import Literal

Spelling = Literal["local", "te"]
SPELLINGS: tuple[Spelling, ...] = ("local", "te")  # Megatron's own layers | TransformerEngine's, with grouped experts
Name = str | tuple[str, str]


@dataclass(frozen=True)
class Copy:
    """One checkpoint tensor is one Megatron tensor: whole on every tensor-parallel rank, or cut along `split`."""

    hf: str
    megatron: Name
    split: Literal[0, 1] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """A tensor with one row per token id, cut along the rows; Megatron's rows past the vocabulary are padding."""

    hf: str
    megatron: Name


@dataclass(frozen=True)
class FusedQKV:
    """Megatron's `linear_qkv`: for each KV group its query heads, then its key, then its value; cut by groups."""

    q: str
    k: str
    v: str
    megatron: Name


@dataclass(frozen=True)
class GateUp:
    """Megatron's gated `linear_fc1`: this rank's rows of the gate, then this rank's rows of the up projection."""

    gate: str
    up: str
    megatron: Name


@dataclass(frozen=True)
class Experts:
    """The same for each expert: expert-parallel ranks hold equal runs of experts, each cut by expert-tensor ranks."""

    each: Copy | GateUp


Entry = Copy | Vocabulary | FusedQKV | GateUp | Experts


@dataclass(frozen=True)
class WeightTable:
    """All checkpoint tensors of a model."""

    first: tuple[Entry, ...]  # before the layers, on the first pipeline stage
    layers: tuple[tuple[Entry, ...], ...]  # of each layer; layers of one kind share one tuple
    last: tuple[Entry, ...]  # after the layers, on the last pipeline stage
    tied_head: Vocabulary | None = None  # the copy of the embedding that the last stage keeps if it is not the first
    num_query_groups: int = 0  # of every FusedQKV
    heads_per_group: int = 0
    head_dim: int = 0
    num_experts: int = 0  # of every Experts
