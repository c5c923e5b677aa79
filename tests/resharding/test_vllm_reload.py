"""Piecewise installation into a processed model leaves what a reload through vLLM's own loader leaves, bit for bit."""

import pytest
import torch

from tests.parallel_utils import run_ranks
from tests.resharding.engine_families import FAMILIES, checkpoint
from tests.resharding.vllm_models import checkpoint_tensors, metas, vllm_model


def _kernel_tensors(model) -> dict[str, torch.Tensor]:
    return {name: tensor.data.clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def _installed(folder: str, new: str, computed: str | None):
    """[names that differ, module sums equal, names through the loader] after both kinds of reload of `new`."""
    with vllm_model(folder) as (model, config), torch.no_grad():
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        from megarl.resharding import vllm_reload
        from megarl.resharding.audit import checksum

        vllm_reload.mend_moe_prepack()
        model.load_weights(iter(checkpoint_tensors(folder).items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        plain = model.load_weights
        if computed is not None:  # a loader that computes: no view of the checkpoint's tensor reaches the parameter
            model.load_weights = lambda ws: plain((n, t + 0 if n == computed else t) for n, t in ws)
        tensors = checkpoint_tensors(new)
        layout = vllm_reload.traced_layout(model, metas(tensors))
        before = _kernel_tensors(model)
        vllm_reload.load_all(model, iter(tensors.items()), config.model_config)
        loaded = _kernel_tensors(model)
        vllm_reload.load_all(model, iter(checkpoint_tensors(folder).items()), config.model_config)
        back = _kernel_tensors(model)

        installation = vllm_reload.Installation(model, layout, audited=True)
        for piece in layout.pieces:
            installation.write(piece, piece.of(tensors[piece.name]))
        if layout.whole:
            installation.load_whole({name: tensors[name] for name in layout.whole})
        installation.finish(config.model_config)
        installed = _kernel_tensors(model)
        sums = torch.stack([checksum(p.of(tensors[p.name]), p.box, torch.float32) for p in layout.pieces])
        guard = vllm_reload.HalfInstalled(model)
        guard.begin(7)
        with pytest.raises(RuntimeError, match="update to weight version 7 .* does not generate"):
            model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        different = lambda a, b: [n for n in a if not torch.equal(a[n], b[n])]  # noqa: E731
        return dict(
            changed=len(different(before, loaded)),
            undone=different(before, back),
            different=different(loaded, installed),
            sums=torch.equal(sums, installation.sums),
            whole=layout.whole,
        )


def _install_each(pairs: list[list[str]]):
    return [_installed(old, new, None) for old, new in pairs]


def test_pieces_install_what_the_loader_installs(tmp_path):
    pairs = [[str(checkpoint(family, tmp_path / f"{family}{i}", i)) for i in (0, 1)] for family in FAMILIES]
    for found in run_ranks(_install_each, 1, pairs)[0]:
        assert found["changed"] > 0
        assert found["undone"] == [] and found["different"] == [] and found["sums"] and found["whole"] == []


def test_what_cannot_be_traced_goes_through_the_loader_with_its_whole_module(tmp_path):
    old, new = (str(checkpoint("qwen2-untied", tmp_path / str(seed), seed)) for seed in (0, 1))
    computed = "model.layers.1.self_attn.k_proj.weight"
    (found,) = run_ranks(_installed, 1, old, new, computed)
    assert found["different"] == [] and found["sums"] and found["changed"] > 0
    module = [computed.replace("k_proj.weight", f"{x}_proj.{kind}") for x in "qkv" for kind in ("weight", "bias")]
    assert sorted(found["whole"]) == sorted(module)
