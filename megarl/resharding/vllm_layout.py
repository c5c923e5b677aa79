"""The pieces of a vLLM worker, read off vLLM's own loader: no table of ours says how vLLM fuses, splits or pads.

While the worker's parameters are on the meta device, its loader is fed meta tensors with the checkpoint's names and
shapes. Every `copy_` that it makes from a view of one of those into a view of a parameter is a piece; nothing is
allocated and nothing is computed. A loader that computes (anything but views) cannot be read so: that tensor travels
whole and goes through the loader at every sync. This file needs torch only; what is private to vLLM is in
`vllm_reload.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.resharding.pieces import Piece, TensorMeta

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


@dataclass
class EngineLayout:
    """What one vLLM worker holds, in checkpoint coordinates."""

    pieces: list[Piece] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)  # of each parameter that a piece lies in
    whole: list[str] = field(default_factory=list)  # checkpoint tensors that only the loader itself can place


class _LoaderTrace(TorchDispatchMode):
    """Records copies from checkpoint tensors into parameters instead of making them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self.destinations = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self.feeding: tuple[str, torch.Tensor] | None = None
        self.copies: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, str] = {}
        self.unreadable: set[str] = set()
        self.loaders_modules: set[str] = set()  # with a parameter that only the loader can fill

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is _aten.copy_.default:
            self._record(args[0], args[1])
            return args[0]
        if function._schema.is_mutable and _storage(args[0]) in self.destinations:
            if function not in _FILLS:  # a fill is padding: what no piece covers is zeroed at every installation
                self._leave_to_loader(args[0])
            return args[0]
        return function(*args, **(kwargs or {}))

    def _record(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.numel() == 0:
            return  # a worker past the end of a small vocabulary takes no row of it
        name, meta = self.feeding
        target = self.destinations.get(_storage(destination))
        box = None if target is None or _storage(source) != _storage(meta) else view_as_box(source, meta.shape)
        if box is None or destination.shape != source.shape:
            self._leave_to_loader(destination)
            return
        parameter, tensor = target
        box, dims = box
        strides = tuple(0 if dim is None else destination.stride(dim) for dim in dims)
        offset = destination.storage_offset() - tensor.storage_offset()
        self.copies.setdefault(name, []).append(Piece(name, box, parameter, offset, strides))
        self.dtypes[parameter] = str(tensor.dtype).removeprefix("torch.")

    def _leave_to_loader(self, destination: torch.Tensor) -> None:
        self.unreadable.add(self.feeding[0])
        target = self.destinations.get(_storage(destination))
        if target is not None:
            self.loaders_modules.add(module_of(target[0]))


def module_of(tensor: str) -> str:
    """The module that a parameter's name leads to."""
    return tensor.rpartition(".")[0]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def view_as_box(view: torch.Tensor, shape: torch.Size) -> tuple[tuple[tuple[int, int], ...], tuple] | None:
    """Which box of a contiguous tensor of `shape` a view of it shows; None when it is no box.

    Returns:
        (box, dims): for each dimension of the box the view's dimension that runs along it (None where the box is one
        element wide there and the view has dropped the dimension).
    """
    if view.storage_offset() == 0 and view.shape == shape and view.is_contiguous():
        return tuple((0, n) for n in shape), tuple(range(len(shape)))
    strides = torch.empty(shape, device="meta").stride()
    runs = {view.stride(d): d for d in range(view.dim()) if view.shape[d] > 1}
    if len(runs) != sum(n > 1 for n in view.shape):
        return None  # two dimensions with one stride: an expanded view
    box, dims, offset = [], [], view.storage_offset()
    for size, stride in zip(shape, strides):
        dim = runs.pop(stride, None) if size > 1 else None
        start, offset = divmod(offset, stride)
        count = 1 if dim is None else view.shape[dim]
        if start + count > size:
            return None
        box.append((start, start + count))
        dims.append(dim)
    return None if runs or offset else (tuple(box), tuple(dims))


def trace(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    parameters: Mapping[str, torch.Tensor],
    metas: Sequence[TensorMeta],
) -> EngineLayout:
    """Run a loader on meta tensors and write down where it would have put them.

    Args:
        load_weights: the model's own loader.
        parameters: every tensor that it may fill, by name; on meta, or real ones (which are not touched).
        metas: the checkpoint's tensors.

    Raises:
        ValueError: a parameter has a quantised type, so that its loader would cast without scales; or a loader looks at
            values, which meta tensors do not have.
    """
    mode = _LoaderTrace(parameters)

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in metas:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            mode.feeding = (meta.name, tensor)
            yield meta.name, tensor

    try:
        with mode:
            load_weights(feed())
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"the engine's loader of {mode.feeding[0]} reads its values ({type(error).__name__}: {error}), so it "
            "cannot be planned; set sync.mode=gathered"
        ) from error
    _check_types(mode)
    # A module is filled either by pieces or by its loader: one tensor that cannot be read takes its module along.
    by_loader = mode.loaders_modules | {
        module_of(piece.tensor) for name in mode.unreadable for piece in mode.copies.get(name, [])
    }
    for name, pieces in mode.copies.items():
        if any(module_of(piece.tensor) in by_loader for piece in pieces):
            mode.unreadable.add(name)
    pieces = [piece for name, found in mode.copies.items() if name not in mode.unreadable for piece in found]
    return EngineLayout(
        pieces=pieces,
        dtypes={piece.tensor: mode.dtypes[piece.tensor] for piece in pieces},
        whole=[meta.name for meta in metas if meta.name in mode.unreadable],
    )


def _check_types(mode: _LoaderTrace) -> None:
    for parameter, name in mode.dtypes.items():
        dtype = getattr(torch, name)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"the engine holds {parameter} as {name}: megarl sends float32, bfloat16 or float16 weights and no "
                "quantisation scales. Start the engine from an unquantised checkpoint, or with quantisation on the "
                "engine's side (vLLM's online quantisation takes raw weights)"
            )
