"""Pieces of all ranks together are every checkpoint tensor, each element exactly once per copy, at the right place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config

from megarl import models
from megarl.resharding import megatron_layout
from megarl.resharding.pieces import TensorMeta, buckets, unpack


def _model(family, hidden, heads_per_group, groups, head_dim, ffn, layers, vocab, tied):
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family](
        hidden_size=hidden,
        num_attention_heads=heads_per_group * groups,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    q, kv = heads_per_group * groups * head_dim, groups * head_dim
    shapes = {}
    for name in megatron_layout.checkpoint_names(models.get(family).weight_table(config)):
        kind = name.split(".")[-2]
        shapes[name] = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
            "embed_tokens": (vocab, hidden),
            "lm_head": (vocab, hidden),
        }.get(kind, (hidden,))
        if name.endswith(".bias"):
            shapes[name] = shapes[name][:1]
    return config, shapes


def _local_shapes(config, shapes, tp):
    """Megatron's parameter shapes per rank, written from its documentation and not from the weight table."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q = shapes["model.layers.0.self_attn.q_proj.weight"][0]
    kv = shapes["model.layers.0.self_attn.k_proj.weight"][0]
    vocab = -(-config.vocab_size // tp)
    found = {"embedding.word_embeddings.weight": (vocab, hidden), "decoder.final_layernorm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = (vocab, hidden)
    for i in range(config.num_hidden_layers):
        block = f"decoder.layers.{i}"
        found |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.self_attention.linear_qkv.weight": ((q + 2 * kv) // tp, hidden),
            f"{block}.self_attention.linear_proj.weight": (hidden, q // tp),
            f"{block}.pre_mlp_layernorm.weight": (hidden,),
            f"{block}.mlp.linear_fc1.weight": (2 * ffn // tp, hidden),
            f"{block}.mlp.linear_fc2.weight": (hidden, ffn // tp),
        }
        if config.model_type == "qwen2":
            found[f"{block}.self_attention.linear_qkv.bias"] = ((q + 2 * kv) // tp,)
    return found


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["qwen2", "llama"]),
    tp=st.sampled_from([1, 2, 4]),
    groups_per_rank=st.integers(1, 2),
    heads_per_group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4]),
    hidden_per_head=st.integers(1, 3),
    ffn_per_rank=st.integers(1, 5),
    layers=st.integers(1, 3),
    vocab=st.integers(5, 23),
    tied=st.booleans(),
)
def test_pieces_cover_everything_once(
    family, tp, groups_per_rank, heads_per_group, head_dim, hidden_per_head, ffn_per_rank, layers, vocab, tied
):
    hidden = hidden_per_head * heads_per_group * groups_per_rank * tp
    config, shapes = _model(
        family, hidden, heads_per_group, groups_per_rank * tp, head_dim, ffn_per_rank * tp, layers, vocab, tied
    )
    table = models.get(family).weight_table(config)
    local = _local_shapes(config, shapes, tp)
    written = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(tp):
        touched = {name: torch.zeros(shape) for name, shape in local.items()}
        for piece in megatron_layout.pieces(table, shapes, local, rank, tp):
            piece.view(touched[piece.tensor]).add_(1)
            piece.of(written[piece.name]).add_(1)
        for name, count in touched.items():
            padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert set(count.flatten().tolist()) <= ({0, 1} if padded else {1}), name
    replicated = {n for n, s in shapes.items() if "norm" in n}
    for name, count in written.items():
        assert torch.equal(count, torch.full_like(count, tp if name in replicated else 1)), name


def test_fused_qkv_lies_group_by_group():
    """Two KV groups of two query heads on one rank: q0 q1 k0 v0 q2 q3 k1 v1, as Megatron's linear_qkv has it."""
    config, shapes = _model("llama", 4, 2, 2, 1, 2, 1, 5, True)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    local = _local_shapes(config, shapes, 1)
    fused = torch.zeros(local[name])
    for piece in megatron_layout.pieces(models.get("llama").weight_table(config), shapes, local, 0, 1):
        if piece.tensor == name:
            base = {"q": 0, "k": 10, "v": 20}[piece.name.split(".")[-2][0]]
            rows = torch.arange(*piece.box[0])[:, None].float() + base
            piece.view(fused).copy_(rows.expand(piece.sizes))
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), limit=st.integers(4, 120))
def test_buckets_keep_order_and_bound(sizes, limit):
    metas = [TensorMeta(str(i), (n,), "float32") for i, n in enumerate(sizes)]
    runs = buckets(metas, limit)
    assert [m for run in runs for m in run] == metas
    for run in runs:
        assert len(run) == 1 or sum(m.nbytes for m in run) <= limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpack_gives_views_in_order(dtype):
    metas = [TensorMeta("a", (2, 3), dtype), TensorMeta("b", (4,), dtype)]
    values = torch.arange(10).to(getattr(torch, dtype))
    views = unpack(metas, values.view(torch.uint8).clone())
    assert torch.equal(views["a"], values[:6].view(2, 3))
    assert torch.equal(views["b"], values[6:])
