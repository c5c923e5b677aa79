"""Core attention over packed sequences, the same on every device and with or without TransformerEngine.

Queries, keys and values arrive as one row of N tokens; each sequence attends to itself only, causally. On CUDA with
flash-attn installed the variable-length kernel does it. Everywhere else sequences of similar length are padded
together (to at most twice their length) and go through torch's scaled_dot_product_attention: padding stands at the
end, so the causal mask alone keeps it out of every real token's sight.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

HAS_FLASH_ATTENTION = find_spec("flash_attn") is not None


@dataclass
class PackedSequences(PackedSeqParams):
    """Where each sequence of a packed row lies. Tokens after cu_seqlens[-1] are padding and belong to none.

    `qkv_format` stays "sbhd": Megatron then rotates queries and keys with one position per token (`models/build.py`),
    in one call instead of one per sequence, and its `thd` rotary code, which runs positions on across sequences when
    the longest length equals the total, is never entered.
    """

    padded_tokens: int = 0  # N, padding included
    length_classes: list = field(default_factory=list)  # [(rows [S, L] of tokens to gather)], one per class of lengths
    place: torch.Tensor | None = None  # [N] where each token's output stands in the concatenated class outputs


def pack_sequences(cu_seqlens: torch.Tensor, padded_tokens: int) -> PackedSequences:
    """Describe a packed row of `padded_tokens` tokens cut at `cu_seqlens` [B + 1] (int32, on any device)."""
    packed = PackedSequences(
        qkv_format="sbhd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, padded_tokens=padded_tokens
    )
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    packed.max_seqlen_q = packed.max_seqlen_kv = int(lengths.max())
    exponents = torch.ceil(torch.log2(lengths.double())).long()
    place = torch.full((padded_tokens,), -1, dtype=torch.long, device=cu_seqlens.device)
    outputs = 0
    for exponent in torch.unique(exponents).tolist():
        members = exponents == exponent
        first, count = starts[members], lengths[members]
        steps = torch.arange(int(count.max()), device=first.device)
        real = steps < count[:, None]  # [S, L]
        rows = torch.where(real, first[:, None] + steps, 0)
        packed.length_classes.append(rows)
        place[rows[real]] = outputs + torch.nonzero(real.flatten()).squeeze(1)
        outputs += rows.numel()
    place[place < 0] = outputs  # padding reads the row of zeros that `forward` appends
    packed.place = place
    return packed


class PackedAttention(MegatronModule):
    """Megatron core attention. forward: query [N, 1, h, d], key and value [N, 1, g, d] -> [N, 1, h * d]."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **kwargs
    ):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.dropout = config.attention_dropout

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedSequences, **kwargs):
        """Attention of each packed sequence to itself. Dropout only while training."""
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        if query.is_cuda and HAS_FLASH_ATTENTION and query.dtype != torch.float32:
            output = self._flash(query, key, value, packed_seq_params, dropout)
        else:
            output = self._padded(query, key, value, packed_seq_params, dropout)
        return output.reshape(packed_seq_params.padded_tokens, 1, -1)

    def _padded(self, query, key, value, packed: PackedSequences, dropout):
        grouped = query.shape[1] != key.shape[1]
        outputs = []
        for rows in packed.length_classes:
            q, k, v = (
                x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2) for x in (query, key, value)
            )
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout, scale=self.softmax_scale, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        outputs.append(query.new_zeros(1, *outputs[0].shape[1:]))
        return torch.cat(outputs).index_select(0, packed.place)

    def _flash(self, query, key, value, packed: PackedSequences, dropout):
        from flash_attn import flash_attn_varlen_func

        used = int(packed.cu_seqlens_q[-1])
        output = flash_attn_varlen_func(
            query[:used],
            key[:used],
            value[:used],
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            dropout_p=dropout,
            softmax_scale=self.softmax_scale,
            causal=True,
        )
        return F.pad(output, (0, 0, 0, 0, 0, packed.padded_tokens - used))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """No parameters, nothing to save."""
        return {}
