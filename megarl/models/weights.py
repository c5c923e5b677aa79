"""The words in which a family's file says how checkpoint tensors lie in Megatron's: data, read by `resharding`.

`{i}` in a name stands for the layer. Checkpoint names and shapes are those of the Hugging Face files.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Copy:
    """One checkpoint tensor is one Megatron tensor: whole on every tensor-parallel rank, or cut along `split`."""

    hf: str
    megatron: str
    split: Literal[0, 1] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """A tensor with one row per token id, cut along the rows; Megatron's rows past the vocabulary are padding."""

    hf: str
    megatron: str


@dataclass(frozen=True)
class FusedQKV:
    """Megatron's `linear_qkv`: for each KV group its query heads, then its key, then its value; cut by groups."""

    q: str
    k: str
    v: str
    megatron: str


@dataclass(frozen=True)
class GateUp:
    """Megatron's gated `linear_fc1`: this rank's rows of the gate, then this rank's rows of the up projection."""

    gate: str
    up: str
    megatron: str


Entry = Copy | Vocabulary | FusedQKV | GateUp


@dataclass(frozen=True)
class WeightTable:
    """All checkpoint tensors of a model: those of the ends, and those of each of `num_layers` layers.

    A Megatron name may be a tuple of spellings (local layers | TransformerEngine layers); a model has exactly one.
    """

    ends: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    num_layers: int
    num_query_groups: int
    heads_per_group: int
    head_dim: int
