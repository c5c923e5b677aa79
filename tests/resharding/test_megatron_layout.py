"""Pieces of all ranks together are every checkpoint tensor, each element exactly once per copy, at the right place."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megarl import models
from megarl.models.weights import Copy, Experts, GateUp, Vocabulary, WeightTable
from megarl.parallel.coordinates import ParallelSizes
from megarl.parallel.layout import Layout
from megarl.resharding import megatron_layout
from megarl.resharding.megatron_layout import pieces_of
from megarl.resharding.pieces import TensorMeta, buckets, unpack

CONFIGS = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def _model(family, hidden, heads_per_group, groups, head_dim, ffn, layers, vocab, tied, **moe):
    config = CONFIGS[family](
        hidden_size=hidden,
        num_attention_heads=heads_per_group * groups,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **moe,
    )
    q, kv = heads_per_group * groups * head_dim, groups * head_dim
    shapes = {}
    for name in megatron_layout.checkpoint_names(models.get(family).weight_table(config)):
        kind = name.split(".")[-2]
        width = config.moe_intermediate_size if ".experts." in name else ffn
        shapes[name] = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
            "gate": (moe.get("num_experts"), hidden),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
            "embed_tokens": (vocab, hidden),
            "lm_head": (vocab, hidden),
        }.get(kind, (hidden,))
        if name.endswith(".bias"):
            shapes[name] = shapes[name][:1]
    return config, shapes


def _local_shapes(config, sizes, rank):
    """Megatron's parameter shapes on a rank, written from its documentation and not from the weight table."""
    hidden, ffn, at = config.hidden_size, config.intermediate_size, sizes.of(rank)
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    vocab = -(-config.vocab_size // sizes.tp)
    found = {}
    for chunk in range(sizes.vpp):
        prefix = f"{chunk}." if sizes.vpp > 1 else ""
        is_first, is_last = (at.pp, chunk) == (0, 0), (at.pp, chunk) == (sizes.pp - 1, sizes.vpp - 1)
        if is_first:
            found[f"{prefix}embedding.word_embeddings.weight"] = (vocab, hidden)
        if is_last:
            found[f"{prefix}decoder.final_layernorm.weight"] = (hidden,)
        if is_last and not (config.tie_word_embeddings and is_first):
            found[f"{prefix}output_layer.weight"] = (vocab, hidden)
        for local, i in enumerate(sizes.layers(at.pp, chunk, config.num_hidden_layers)):
            block = f"{prefix}decoder.layers.{local}"
            found |= {
                f"{block}.input_layernorm.weight": (hidden,),
                f"{block}.self_attention.linear_qkv.weight": ((q + 2 * kv) // sizes.tp, hidden),
                f"{block}.self_attention.linear_proj.weight": (hidden, q // sizes.tp),
                f"{block}.pre_mlp_layernorm.weight": (hidden,),
            }
            if config.model_type == "qwen2":
                found[f"{block}.self_attention.linear_qkv.bias"] = ((q + 2 * kv) // sizes.tp,)
            if config.model_type in ("qwen3", "qwen3_moe"):
                found |= {f"{block}.self_attention.{x}_layernorm.weight": (config.head_dim,) for x in "qk"}
            if config.model_type == "qwen3_moe" and i not in config.mlp_only_layers:
                share = config.moe_intermediate_size // sizes.etp
                found[f"{block}.mlp.router.weight"] = (config.num_experts, hidden)
                for e in range(config.num_experts // sizes.ep):
                    found[f"{block}.mlp.experts.local_experts.{e}.linear_fc1.weight"] = (2 * share, hidden)
                    found[f"{block}.mlp.experts.local_experts.{e}.linear_fc2.weight"] = (hidden, share)
            else:
                found[f"{block}.mlp.linear_fc1.weight"] = (2 * ffn // sizes.tp, hidden)
                found[f"{block}.mlp.linear_fc2.weight"] = (hidden, ffn // sizes.tp)
    return found


def _copies(name, config, sizes):
    """How many ranks hold each element of a checkpoint tensor."""
    if ".experts." in name:
        return sizes.edp
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return sizes.dp * sizes.tp
    if name == "model.embed_tokens.weight" and config.tie_word_embeddings and sizes.pp > 1:
        return 2 * sizes.dp
    return sizes.dp


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_cover_everything_once(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    family = draw(*CONFIGS)
    tp, pp = draw(1, 2, 4), draw(1, 2, 3)
    ep, etp = (draw(1, 2, 3), draw(1, 2)) if family == "qwen3_moe" else (1, 1)
    world_size = pp * tp * ep * etp // draw(*(n for n in (1, 2, 4) if tp % n == 0 and ep * etp % n == 0)) * draw(1, 2)
    vpp = draw(1, 2) if pp > 1 else 1
    first, last = (draw(None, vpp), draw(None, 2 * vpp)) if pp == 3 else (None, None)
    sizes = ParallelSizes(world_size, tp, pp, vpp, ep, etp, first, last)
    layers = vpp * draw(1, 2) * (pp - (first is not None) - (last is not None)) + (first or 0) + (last or 0)
    groups, heads_per_group, head_dim = tp * draw(1, 2), draw(1, 2, 3), draw(2, 4)
    moe = {}
    if family == "qwen3_moe":
        moe = dict(num_experts=ep * draw(2, 3), num_experts_per_tok=2, moe_intermediate_size=etp * draw(1, 2, 5))
        moe["mlp_only_layers"] = data.draw(st.lists(st.integers(0, layers - 1), max_size=2))
    config, shapes = _model(
        family,
        hidden=heads_per_group * groups * draw(1, 2),
        heads_per_group=heads_per_group,
        groups=groups,
        head_dim=head_dim,
        ffn=tp * draw(1, 3, 5),
        layers=layers,
        vocab=data.draw(st.integers(5, 23)),
        tied=draw(True, False),
        **moe,
    )
    table = models.get(family).weight_table(config)
    holdings = megatron_layout.holdings(table, shapes, sizes, "local")
    written = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(world_size):
        local = _local_shapes(config, sizes, rank)
        touched = {name: torch.zeros(shape) for name, shape in local.items()}
        pieces = pieces_of(table, shapes, sizes, rank, "local")
        assert pieces == [p for holding in holdings if rank in holding.ranks for p in holding.pieces]
        for piece in pieces:
            piece.view(touched[piece.tensor]).add_(1)
            piece.of(written[piece.name]).add_(1)
        for name, count in touched.items():
            padded = name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
            assert set(count.flatten().tolist()) <= ({0, 1} if padded else {1}), name
        assert megatron_layout.find_spelling(table, sizes, rank, local) == "local"
    for name, count in written.items():
        assert torch.equal(count, torch.full_like(count, _copies(name, config, sizes))), name


def test_fused_qkv_lies_group_by_group():
    """Two KV groups of two query heads on one rank: q0 q1 k0 v0 q2 q3 k1 v1, as Megatron's linear_qkv has it."""
    config, shapes = _model("llama", 4, 2, 2, 1, 2, 1, 5, True)
    table, sizes = models.get("llama").weight_table(config), ParallelSizes(1)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fused = torch.zeros(_local_shapes(config, sizes, 0)[name])
    for piece in pieces_of(table, shapes, sizes, 0, "local"):
        if piece.tensor == name:
            base = {"q": 0, "k": 10, "v": 20}[piece.name.split(".")[-2][0]]
            rows = torch.arange(*piece.box[0])[:, None].float() + base
            piece.view(fused).copy_(rows.expand(piece.sizes))
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_an_expert_shard_lies_where_megatron_has_it():
    """EP2 x ETP2, four experts of width 6: rank 3 holds experts 2 and 3, rows 3..6 of gate and up, columns 3..6."""
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    config, shapes = _model("qwen3_moe", 4, 2, 1, 2, 2, 2, 5, False, **moe)
    table = models.get("qwen3_moe").weight_table(config)
    for spelling, fc1, fc2 in (
        ("local", "local_experts.1.linear_fc1.weight", "local_experts.1.linear_fc2.weight"),
        ("te", "linear_fc1.weight1", "linear_fc2.weight1"),
    ):
        pieces = pieces_of(table, shapes, ParallelSizes(4, ep=2, etp=2), 3, spelling)
        of_expert = {p.name: p[1:] for p in pieces if p.name.startswith("model.layers.1.mlp.experts.3.")}
        assert of_expert == {
            "model.layers.1.mlp.experts.3.gate_proj.weight": (
                ((3, 6), (0, 4)),
                f"decoder.layers.1.mlp.experts.{fc1}",
                0,
                (4, 1),
            ),
            "model.layers.1.mlp.experts.3.up_proj.weight": (
                ((3, 6), (0, 4)),
                f"decoder.layers.1.mlp.experts.{fc1}",
                12,
                (4, 1),
            ),
            "model.layers.1.mlp.experts.3.down_proj.weight": (
                ((0, 4), (3, 6)),
                f"decoder.layers.1.mlp.experts.{fc2}",
                0,
                (3, 1),
            ),
        }


def test_transformer_engine_spelling_is_found_on_every_stage():
    """TransformerEngine fuses a norm into the linear layer behind it, but not into a router or the experts."""
    config, _ = _model(
        "qwen3_moe", 4, 2, 1, 2, 2, 4, 5, True, num_experts=2, moe_intermediate_size=2, mlp_only_layers=[2, 3]
    )
    table, sizes = models.get("qwen3_moe").weight_table(config), ParallelSizes(2, pp=2)
    attention = ["linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"]
    attention = [f"self_attention.{x}" for x in (*attention, "q_layernorm.weight", "k_layernorm.weight")]
    moe = ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.experts.linear_fc1.weight0"]
    plain = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    for rank, mlp in ((0, moe), (1, plain)):
        names = {f"decoder.layers.{i}.{x}" for i in range(2) for x in attention + mlp}
        assert megatron_layout.find_spelling(table, sizes, rank, names) == "te"
    with pytest.raises(AssertionError, match="neither spelling"):
        megatron_layout.find_spelling(table, sizes, 0, {"decoder.layers.0.mlp.router.weight"})


def _sharded(config, shapes, sizes, rank):
    tensors = {name: torch.empty(shape) for name, shape in _local_shapes(config, sizes, rank).items()}
    table = models.get(config.model_type).weight_table(config)
    return megatron_layout.ShardedModel(Layout(rank, sizes, False, None), table, shapes, tensors)


def test_every_box_has_one_source():
    """Over all ranks, data-parallel copies and tied copies aside, the whole checkpoint once."""
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4, mlp_only_layers=[0])
    config, shapes = _model("qwen3_moe", 4, 2, 2, 2, 2, 4, 5, True, **moe)
    sizes = ParallelSizes(16, tp=2, pp=2, vpp=2, ep=2, etp=2)
    written = {name: torch.zeros(shape) for name, shape in shapes.items()}
    found = _sharded(config, shapes, sizes, 3).sources
    for piece in (p for pieces in found.values() for p in pieces):
        piece.of(written[piece.name]).add_(1)
    assert all(torch.equal(count, torch.ones_like(count)) for count in written.values())
    assert found == _sharded(config, shapes, sizes, 12).sources  # what each rank finds on its own


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.q_proj.weight", (9, 4)),
        ("model.layers.2.self_attn.k_proj.weight", (5, 4)),
        ("model.layers.2.self_attn.k_proj.weight", (4, 5)),
        ("model.layers.1.self_attn.v_proj.weight", (3, 4)),
        ("model.layers.1.mlp.up_proj.weight", (5, 4)),
        ("model.layers.3.mlp.experts.3.up_proj.weight", (4, 3)),
        ("model.layers.3.mlp.experts.3.down_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.q_norm.weight", (3,)),
        ("model.layers.0.mlp.gate.weight", (4, 4, 1)),
        ("model.layers.0.mlp.gate.weight", (16,)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 4)),
        ("model.layers.1.mlp.down_proj.weight", (2, 8)),
        ("model.norm.weight", ()),
        ("model.norm.weight", (5,)),
    ],
)
def test_a_misshapen_tensor_is_refused(name, shape):
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4, mlp_only_layers=[1])
    config, shapes = _model("qwen3_moe", 4, 2, 2, 2, 4, 4, 5, False, **moe)
    sizes = ParallelSizes(4, tp=2, pp=2, ep=2)
    for rank in range(4):
        _sharded(config, shapes, sizes, rank).check_covered()
    table = models.get("qwen3_moe").weight_table(config)
    concerned = [r for r in range(4) if any(name == p.name for p in pieces_of(table, shapes, sizes, r, "local"))]
    for rank in concerned:
        with pytest.raises(ValueError, match=f"do not fit its config.json: .*{name}"):
            _sharded(config, shapes | {name: shape}, sizes, rank).check_covered()


def test_the_table_can_say_what_deepseek_v3_needs():
    """Latent attention, a first dense layer, shared experts: no family of ours yet, but a shape to plan for."""
    block, mcore = "model.layers.{i}", "decoder.layers.{i}"
    attention = tuple(
        Copy(f"{block}.self_attn.{hf}.weight", f"{mcore}.self_attention.{name}.weight", split)
        for hf, name, split in (
            ("q_a_proj", "linear_q_down_proj", None),
            ("q_b_proj", "linear_q_up_proj", 0),
            ("kv_a_proj_with_mqa", "linear_kv_down_proj", None),
            ("kv_b_proj", "linear_kv_up_proj", 0),
            ("o_proj", "linear_proj", 1),
        )
    )

    def mlp(hf, name):
        return (
            GateUp(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", f"{name}.linear_fc1.weight"),
            Copy(f"{hf}.down_proj.weight", f"{name}.linear_fc2.weight", split=1),
        )

    experts = mlp(f"{block}.mlp.experts.{{e}}", f"{mcore}.mlp.experts.local_experts.{{e}}")
    moe = (*mlp(f"{block}.mlp.shared_experts", f"{mcore}.mlp.shared_experts"), *map(Experts, experts))
    table = WeightTable(
        first=(Vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight"),),
        layers=(attention + mlp(f"{block}.mlp", f"{mcore}.mlp"), attention + moe, attention + moe),
        last=(Vocabulary("lm_head.weight", "output_layer.weight"),),
        num_experts=8,
    )
    names = megatron_layout.checkpoint_names(table)
    assert len(names) == len(set(names)) == 2 + 3 * 5 + 3 * 3 + 2 * 8 * 3
    sizes = ParallelSizes(16, tp=4, pp=2, ep=4, etp=2, first_stage_layers=1)
    holdings = megatron_layout.holdings(table, dict.fromkeys(names, (16, 16)), sizes, "local")
    held = Counter()
    for holding in holdings:
        for piece in holding.pieces:
            held[piece.name] += piece.numel * len(holding.ranks)
    for name in names:
        whole = "_a_proj" in name
        copies = sizes.edp if ".experts." in name else sizes.dp * (sizes.tp if whole else 1)
        assert held[name] == copies * 16 * 16, name


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
