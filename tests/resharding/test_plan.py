"""A plan moves every element once to every place that needs it, whatever the layouts; in rounds of bounded size."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.audit import Ledger, checksum
from megarl.resharding.pieces import Holding, Piece, TensorMeta
from megarl.resharding.plan import Plan, Sources, make_plan, whole
from megarl.resharding.transport import nbytes, pack, scatter

DESTINATION = 100  # destinations are numbered from here


def _cut(size: int, cuts: list[float]) -> list[tuple[int, int]]:
    ends = sorted({0, size, *(int(c * size) for c in cuts)})
    return list(zip(ends, ends[1:]))


@st.composite
def layouts(draw, shapes: dict[str, tuple[int, ...]], first_rank: int, copies: int):
    """Holdings that tile every tensor: random cuts on random ranks, in two fused local tensors each, in any order."""
    ranks = draw(st.integers(1, 3))
    tiles: dict[int, list] = {rank: [] for rank in range(ranks)}
    fractions = st.lists(st.floats(0.1, 0.9), max_size=2)
    for name, shape in shapes.items():
        per_dim = [_cut(size, draw(fractions)) for size in shape]
        boxes = [()]
        for ends in per_dim:
            boxes = [(*box, end) for box in boxes for end in ends]
        for box in boxes:
            tiles[draw(st.integers(0, ranks - 1))].append((name, box))
    holdings = []
    for rank, held in tiles.items():
        held = draw(st.permutations(held))
        pieces, at = [], 0
        for name, box in held:
            sizes = [stop - start for start, stop in box]
            transposed = len(sizes) == 2 and draw(st.booleans())  # a local tensor may hold a box the other way round
            strides = [1, sizes[0]] if transposed else [prod(sizes[d + 1 :]) for d in range(len(sizes))]
            pieces.append(Piece(name, box, f"module{len(pieces) % 2}.fused", at, tuple(strides)))
            at += prod(sizes)
        own = tuple(first_rank + rank + ranks * copy for copy in range(copies))
        if pieces:
            holdings.append(Holding(own, pieces))
    return holdings


def _empty(holdings: list[Holding], dtype) -> dict[int, dict[str, torch.Tensor]]:
    tensors = {}
    for holding in holdings:
        size = max(p.offset + p.numel for p in holding.pieces)
        for rank in holding.ranks:
            tensors[rank] = {p.tensor: torch.full((size,), float("nan"), dtype=dtype) for p in holding.pieces}
    return tensors


def run(plan: Plan, give, take, metas, bucket_bytes=None) -> None:
    """Carry a plan out in one process, through the same packing as between processes."""
    for transfers in plan.rounds:
        out, into = {}, {}
        for source in {t.source for t in transfers}:
            for destination in {t.destination for t in transfers if t.source == source}:
                some = [t for t in transfers if (t.source, t.destination) == (source, destination)]
                buffer = torch.empty(nbytes(some), dtype=torch.uint8)
                pack(some, give[source], metas, buffer)
                scatter(some, buffer, take[destination], metas)
                out[source] = out.get(source, 0) + len(buffer)
                into[destination] = into.get(destination, 0) + len(buffer)
        if bucket_bytes is not None:
            assert max(out.values()) <= bucket_bytes and max(into.values()) <= bucket_bytes


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bucket=st.integers(16, 400), wire=st.sampled_from(["float32", "bfloat16"]))
def test_every_element_arrives_once_wherever_it_is_needed(data, bucket, wire):
    shapes = data.draw(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 7), st.integers(1, 7))),
            min_size=1,
        )
    )
    sources = data.draw(layouts(shapes, 0, copies=data.draw(st.integers(1, 2))))
    destinations = data.draw(layouts(shapes, DESTINATION, copies=data.draw(st.integers(1, 2))))
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    metas = {name: TensorMeta(name, shape, wire) for name, shape in shapes.items()}
    give, take = _empty(sources, torch.float32), _empty(destinations, getattr(torch, wire))
    for holding in sources:
        for rank in holding.ranks:
            for piece in holding.pieces:
                piece.view(give[rank][piece.tensor]).copy_(piece.of(values[piece.name]))
    plan = make_plan(Sources(sources), destinations, metas, bucket)
    run(plan, give, take, metas, bucket)
    for holding in destinations:
        for rank in holding.ranks:
            for piece in holding.pieces:
                want = piece.of(values[piece.name]).to(getattr(torch, wire))
                assert torch.equal(piece.view(take[rank][piece.tensor]), want)
    needed = sum(len(h.ranks) * sum(p.numel for p in h.pieces) for h in destinations)
    assert sum(plan.ingress().values()) == needed * metas[next(iter(metas))].itemsize
    _audit_agrees(plan, sources, destinations, give, take, metas)


def _audit_agrees(plan, sources, destinations, give, take, metas) -> None:
    ledger = Ledger(plan)
    ranks = {rank for holding in sources for rank in holding.ranks}
    expected = sum(ledger.sums(rank, give[rank], metas) for rank in ranks)
    for holding in destinations:
        places = torch.tensor([ledger.places[p.name, p.box] for p in holding.pieces])
        for rank in holding.ranks:
            found = torch.stack(
                [checksum(p.view(take[rank][p.tensor]), p.box, take[rank][p.tensor].dtype) for p in holding.pieces]
            )
            assert ledger.differences(expected, found, places) == []


def _rows(name: str, first: int, last: int, width: int, tensor: str = "w.t") -> Piece:
    return Piece(name, ((first, last), (0, width)), tensor, 0, (width, 1))


METAS = {"x": TensorMeta("x", (8, 4), "float32")}


def test_sources_share_the_load_and_the_nearest_serve_first():
    copies = [Holding((0, 1, 2, 3), [whole("x", (8, 4))])]
    wanted = [Holding((DESTINATION,), [whole("x", (8, 4))])]
    assert sorted(make_plan(Sources(copies), wanted, METAS, 32).egress().values()) == [32] * 4
    near = make_plan(Sources(copies), wanted, METAS, 32, distance=lambda source, _: 0 if source in (1, 3) else 2)
    assert near.egress() == {1: 64, 3: 64}


def test_equal_layouts_give_equal_digests_and_others_do_not():
    sources, wanted = Sources([Holding((0,), [whole("x", (8, 4))])]), [Holding((DESTINATION,), [_rows("x", 0, 4, 4)])]
    one, same = (make_plan(sources, wanted, METAS, 64) for _ in range(2))
    other = make_plan(sources, [Holding((DESTINATION,), [_rows("x", 1, 5, 4)])], METAS, 64)
    assert one.digest == same.digest != other.digest


def test_what_no_source_holds_is_named():
    with pytest.raises(ValueError, match="y is asked for, and no source holds it"):
        make_plan(Sources([]), [Holding((0,), [whole("y", (2,))])], {"y": TensorMeta("y", (2,), "float32")})
    half = Sources([Holding((0,), [_rows("x", 0, 4, 4)])])
    with pytest.raises(ValueError, match="do not make up"):
        make_plan(half, [Holding((1,), [whole("x", (8, 4))])], METAS)


def test_a_worker_may_hold_a_box_in_two_places():
    values = torch.randn(8, 4)
    halves = [Holding((rank,), [_rows("x", 4 * rank, 4 * rank + 4, 4)]) for rank in (0, 1)]
    twice = [Holding((DESTINATION,), [whole("x", (8, 4), f"{module}.weight") for module in ("embedding", "head")])]
    plan = make_plan(Sources(halves), twice, METAS, 64)
    give = {rank: {"w.t": values[4 * rank : 4 * rank + 4].contiguous()} for rank in (0, 1)}
    take = {DESTINATION: {f"{module}.weight": torch.empty(8, 4) for module in ("embedding", "head")}}
    run(plan, give, take, METAS, 64)
    _audit_agrees(plan, halves, twice, give, take, METAS)


def test_a_module_is_filled_in_one_go():
    """Checkpoint order puts the bias at the end; the plan brings it with the weight of its module."""
    metas = {name: TensorMeta(name, (4,), "float32") for name in ("q.weight", "norm.weight", "q.bias")}
    pieces = [
        Piece("q.weight", ((0, 4),), "qkv.weight", 0, (1,)),
        Piece("norm.weight", ((0, 4),), "norm.weight", 0, (1,)),
        Piece("q.bias", ((0, 4),), "qkv.bias", 0, (1,)),
    ]
    plan = make_plan(Sources([Holding((0,), [whole(n, (4,)) for n in metas])]), [Holding((9,), pieces)], metas, 16)
    assert [t.take.tensor for t in plan] == ["qkv.weight", "qkv.bias", "norm.weight"]
