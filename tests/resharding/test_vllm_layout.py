"""What is read off vLLM's loader is what its loader does: every parameter, every element, at every coordinate."""

import pytest
import torch

from megarl.resharding.vllm_layout import trace, view_as_box
from tests.parallel_utils import run_ranks
from tests.resharding.engine_families import FAMILIES, checkpoint
from tests.resharding.vllm_models import checkpoint_tensors, metas, vllm_model


def _numbered(folder: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors with values that name each element: no two alike, all exact in float32."""
    found, at = {}, 0
    for name, tensor in checkpoint_tensors(folder).items():
        found[name] = (torch.arange(tensor.numel(), dtype=torch.float64) + at).view(tensor.shape).float()
        at += tensor.numel()
    assert at < 1 << 24
    return found


def _raw(model) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}


def _loaded_and_written(folders: list[str], coordinates: dict) -> list[dict]:
    """For each checkpoint: pieces, and where vLLM's loader and our pieces leave different bits."""
    findings = []
    for folder in folders:
        with vllm_model(folder, **coordinates) as (model, _):
            from megarl.resharding.vllm_reload import traced_layout

            tensors = _numbered(folder)
            with torch.no_grad():
                for raw in _raw(model).values():
                    raw.zero_()
                layout = traced_layout(model, metas(tensors))
                model.load_weights(iter(tensors.items()))
                loaded = {name: raw.clone() for name, raw in _raw(model).items()}
                for raw in _raw(model).values():
                    raw.zero_()
                for piece in layout.pieces:
                    piece.view(_raw(model)[piece.tensor]).copy_(piece.of(tensors[piece.name]))
            different = [name for name, raw in _raw(model).items() if not torch.equal(raw, loaded[name])]
            filled = sum(bool(raw.any()) for raw in loaded.values())
            pieces = [(p.name, p.box) for p in layout.pieces]
            findings.append(dict(different=different, whole=layout.whole, pieces=pieces, filled=filled))
    return findings


@pytest.mark.parametrize("coordinates", [{}, dict(tp=2), dict(pp=2), dict(tp=2, ep=True)], ids=str)
def test_traced_pieces_do_what_the_loader_does(coordinates, tmp_path):
    families = [family for family in FAMILIES if not coordinates.get("ep") or "moe" in family]
    folders = [str(checkpoint(family, tmp_path / family, 0)) for family in families]
    world = coordinates.get("tp", 1) * coordinates.get("pp", 1)
    ranks = run_ranks(_loaded_and_written, world, folders, coordinates)
    for folder, *findings in zip(folders, *ranks, strict=True):
        seen = {name: torch.zeros(tensor.shape) for name, tensor in checkpoint_tensors(folder).items()}
        for found in findings:
            assert found["different"] == [] and found["whole"] == [] and found["filled"] > 10
            for name, box in found["pieces"]:
                seen[name][tuple(slice(*ends) for ends in box)] += 1
        assert [name for name, count in seen.items() if not (count >= 1).all()] == []


@pytest.mark.parametrize(
    "make, box, dims",
    [
        (lambda t: t, ((0, 6), (0, 4)), (0, 1)),
        (lambda t: t[2:5], ((2, 5), (0, 4)), (0, 1)),
        (lambda t: t.narrow(1, 1, 2), ((0, 6), (1, 3)), (0, 1)),
        (lambda t: t.t()[1:3], ((0, 6), (1, 3)), (1, 0)),
        (lambda t: t[3], ((3, 4), (0, 4)), (None, 0)),
        (lambda t: t[:, 2:3], ((0, 6), (2, 3)), (0, None)),
    ],
)
def test_a_view_is_a_box(make, box, dims):
    assert view_as_box(make(torch.empty(6, 4, device="meta")), torch.Size((6, 4))) == (box, dims)


@pytest.mark.parametrize(
    "make", [lambda t: t.view(3, 8), lambda t: t.flatten()[2:7], lambda t: t[::2], lambda t: t[:1].expand(6, 4)]
)
def test_what_is_no_box(make):
    assert view_as_box(make(torch.empty(6, 4, device="meta")), torch.Size((6, 4))) is None


def test_a_quantised_parameter_is_refused():
    parameter = torch.empty(4, 2, dtype=torch.float8_e4m3fn, device="meta")

    def load(weights):
        for _, tensor in weights:
            parameter.copy_(tensor)

    with pytest.raises(ValueError, match="float8_e4m3fn.*no quantisation scales"):
        trace(load, {"layer.weight": parameter}, metas({"w": torch.empty(4, 2)}))


def test_a_loader_that_reads_values_is_refused():
    parameter = torch.empty(4, 2, device="meta")

    def load(weights):
        for _, tensor in weights:
            parameter.copy_(tensor if tensor.sum().item() > 0 else tensor)

    with pytest.raises(ValueError, match="loader of w reads its values.*sync.mode=gathered"):
        trace(load, {"layer.weight": parameter}, metas({"w": torch.empty(4, 2)}))
