"""A vLLM plugin that breaks or measures things inside an engine's workers, when a file says so.

`install(folder, monkeypatch)` puts it on PYTHONPATH as a distribution with an entry point, so that vLLM loads it in
each of its processes, before megarl's; `choose(fault)` picks the fault of the syncs that follow.
"""

import json
import os
from pathlib import Path

_ENTRY_POINTS = "[vllm.general_plugins]\naaa_faults = megarl_faults:register\n"
_FILE = "MEGARL_TEST_FAULT_FILE"


def install(folder: Path, monkeypatch) -> None:
    info = folder / "megarl_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megarl-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "megarl_faults.py").write_text(Path(__file__).read_text())
    (folder / "megarl_memory.py").write_text((Path(__file__).parents[1] / "memory.py").read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv(_FILE, str(folder / "fault"))


def choose(fault: str) -> None:
    Path(os.environ[_FILE]).write_text(fault)


def measured() -> dict[str, int]:
    """What "measure" found at the last sync, in bytes."""
    return json.loads(Path(os.environ[_FILE]).with_suffix(".json").read_text())


def register() -> None:
    import torch.distributed as dist
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from megarl.resharding import vllm_reload

    def chosen(fault: str) -> bool:
        file = Path(os.environ[_FILE])
        return file.exists() and file.read_text() == fault

    heads = vllm_reload.process_tied_heads
    vllm_reload.process_tied_heads = lambda model: None if chosen("tied copy left behind") else heads(model)

    unmended, mend = UnquantizedFusedMoEMethod._setup_kernel, vllm_reload.mend_moe_prepack

    def mend_unless_chosen():
        mend()
        mended = UnquantizedFusedMoEMethod._setup_kernel
        UnquantizedFusedMoEMethod._setup_kernel = lambda *args, **kwargs: (
            unmended if chosen("skipped MoE prepack") else mended
        )(*args, **kwargs)

    vllm_reload.mend_moe_prepack = mend_unless_chosen

    write = vllm_reload.Installation.write

    def write_unless_chosen(self, take, values):
        if chosen("worker fails half-way") and take.name.startswith("model.layers.2."):
            raise RuntimeError("asked to fail")
        if chosen("box lost in the worker") and take.name == "model.layers.1.self_attn.o_proj.weight":
            values = values * 0
        write(self, take, values)

    vllm_reload.Installation.write = write_unless_chosen

    finish = vllm_reload.Installation.finish

    def finish_unless_chosen(self, *args):
        if chosen("last worker fails at the end") and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("asked to fail")
        finish(self, *args)

    vllm_reload.Installation.finish = finish_unless_chosen

    traced = vllm_reload.traced_layout

    def traced_with_a_gap(model, metas):
        layout = traced(model, metas)
        if chosen("worker takes less"):
            layout.pieces = [piece for piece in layout.pieces if piece.name != "model.norm.weight"]
        return layout

    vllm_reload.traced_layout = traced_with_a_gap
    _measure(vllm_reload, chosen)


def _measure(vllm_reload, chosen) -> None:
    """The fault "measure": peaks of an installation, without and with what vLLM's processing of a module takes."""
    import msgspec
    from megarl_memory import AllocationMeter

    meter = AllocationMeter()
    construct, process, finish = (
        vllm_reload.Installation.__init__,
        vllm_reload._layerwise_process,
        vllm_reload.Installation.finish,
    )

    def constructed(self, *args, **kwargs):
        if chosen("measure"):
            meter.start()
        construct(self, *args, **kwargs)

    def processed(layer, info):
        if not chosen("measure"):
            return process(layer, info)
        meter.stop()
        with_processing = meter.peak
        meter.start()
        process(layer, info)
        meter.stop()
        meter.peak, meter.peak_with_processing = with_processing, max(meter.peak, with_processing)
        meter.start()

    def finished(self, *args):
        if chosen("measure"):
            meter.stop()
            found = {"peak": meter.peak, "peak_with_processing": meter.peak_with_processing}
            Path(os.environ[_FILE]).with_suffix(".json").write_bytes(msgspec.json.encode(found))
        finish(self, *args)

    vllm_reload.Installation.__init__ = constructed
    vllm_reload._layerwise_process = processed
    vllm_reload.Installation.finish = finished
