"""vLLM's layer-wise reload, driven piece by piece. Every call that is private to vLLM stands here (tested: 0.32).

One installation: `Installation(model, layout)` puts every layer back into its raw form, without memory; `write` gives a
module memory when its first box arrives; a module that is complete is audited and then processed by vLLM's own code
(prepacks, transpositions, quantisation) into the tensors that the running engine reads; `finish` ends the reload.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from megarl.resharding.audit import checksum
from megarl.resharding.pieces import Piece, TensorMeta
from megarl.resharding.vllm_layout import EngineLayout, trace


def _loadable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in get_layer_tensors(module).items():
            if name not in SKIP_LOAD_TENSORS:
                yield f"{path}.{name}", module, name, tensor


@torch.no_grad()
def traced_layout(model: torch.nn.Module, metas: Iterable[TensorMeta]) -> EngineLayout:
    """Where the running model's loader puts each checkpoint tensor; the model is afterwards as before."""
    initialize_layerwise_reload(model)
    try:
        for _, _, _, tensor in _loadable(model):
            tensor.weight_loader = _get_original_loader(tensor)
        layout = trace(model.load_weights, {name: tensor for name, _, _, tensor in _loadable(model)}, list(metas))
        deferred = {path for path, module in model.named_modules() if is_deferred_attention_layer(module)}
    finally:
        for module in model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                _place_kernel_tensors(module, info)
                info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload
    # Scales inside attention layers are re-read by vLLM at the end of a reload, from what its loader was given.
    layout.whole += [piece.name for piece in layout.pieces if piece.tensor.rpartition(".")[0] in deferred]
    layout.pieces = [piece for piece in layout.pieces if piece.tensor.rpartition(".")[0] not in deferred]
    return layout


class Installation:
    """One weight update of a running model."""

    def __init__(self, model: torch.nn.Module, layout: EngineLayout, audited: bool):
        self._model = model
        self._modules = dict(model.named_modules())
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}
        for index, piece in enumerate(layout.pieces):
            self._pieces.setdefault(piece.tensor.rpartition(".")[0], []).append((index, piece))
        self._missing = {path: sum(piece.numel for _, piece in pieces) for path, pieces in self._pieces.items()}
        self._open: set[str] = set()
        self.audit_seconds = 0.0
        self.sums = torch.zeros(len(layout.pieces), dtype=torch.int64) if audited else None
        with torch.no_grad():
            initialize_layerwise_reload(model)

    @torch.no_grad()
    def write(self, take: Piece, values: torch.Tensor) -> None:
        """Put a box's values (its sizes, the parameter's dtype) in place; the last box of a module installs it."""
        path, _, name = take.tensor.rpartition(".")
        module = self._modules[path]
        if path not in self._open:
            self._open_module(path, module)
        take.view(getattr(module, name)).copy_(values)
        self._missing[path] -= take.numel
        if self._missing[path] == 0:
            self._close_module(path, module)

    @torch.no_grad()
    def load_whole(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give whole checkpoint tensors to the model's own loader, which processes their layers itself."""
        self._model.load_weights(iter(tensors.items()))

    @torch.no_grad()
    def finish(self, model_config: ModelConfig) -> None:
        """End the reload. Every module must be complete."""
        assert not self._open, f"these modules did not get all of their weights: {sorted(self._open)}"
        finalize_layerwise_reload(self._model, model_config)
        process_tied_heads(self._model)

    def _open_module(self, path: str, module: torch.nn.Module) -> None:
        self._open.add(path)
        materialize_layer(module, get_layerwise_info(module))
        covered: dict[str, int] = {}
        for _, piece in self._pieces[path]:
            covered[piece.tensor] = covered.get(piece.tensor, 0) + piece.numel
        for name, tensor in get_layer_tensors(module).items():
            if name not in SKIP_LOAD_TENSORS and covered.get(f"{path}.{name}", 0) < tensor.numel():
                tensor.data.zero_()  # padding, which no piece covers

    def _close_module(self, path: str, module: torch.nn.Module) -> None:
        before = time.perf_counter()
        if self.sums is not None:
            for index, piece in self._pieces[path]:
                raw = getattr(module, piece.tensor.rpartition(".")[2])
                self.sums[index] = checksum(piece.view(raw), piece.box, raw.dtype)
        self.audit_seconds += time.perf_counter() - before
        self._open.remove(path)
        _layerwise_process(module, get_layerwise_info(module))


def process_tied_heads(model: torch.nn.Module) -> None:
    """A tied lm_head loads nothing itself, so a reload leaves out its post-processing.

    On the CPU that is a prepacked copy, which would go on answering with the old embedding.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def mend_moe_prepack() -> None:
    """Make a reloaded MoE layer on the CPU prepack its experts again, which vLLM 0.32 does only the first time."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(set_up, "is_mended"):
        return

    def set_up_and_prepack(self, layer, w13, w2):
        is_update = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_update and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_prepack.is_mended = True
    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_prepack


class HalfInstalled:
    """Lets no forward pass run between the start of an update and its accepted end.

    An engine whose update broke off stops here, whoever resumed it: it never answers from a mixture of two versions.
    """

    def __init__(self, model: torch.nn.Module):
        self._since: str | None = None
        model.register_forward_pre_hook(self._refuse)

    def begin(self, version: int) -> None:
        self._since = f"the update to weight version {version} did not end well"

    def end(self) -> None:
        self._since = None

    def _refuse(self, module, arguments) -> None:
        if self._since is not None:
            raise RuntimeError(f"megarl: {self._since}; this engine holds a mixture of weights and does not generate")


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Tensors made inside, layers' post-processing included, are made where the model is."""
    with torch.device(device):
        yield


@torch.no_grad()
def load_all(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], model_config: ModelConfig) -> None:
    """A whole reload through the model's own loader, which splits and fuses as it does at the start of an engine."""
    initialize_layerwise_reload(model)
    model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    process_tied_heads(model)
