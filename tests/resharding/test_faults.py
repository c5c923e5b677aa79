"""What can go wrong with a delivery or an installation is caught before a completion is sampled, and named."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.rollout import SyncConfig
from megarl.errors import MegarlError
from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding import transport
from megarl.resharding.bridge import Bridge
from megarl.resharding.handshake import Hello
from megarl.resharding.parity import Parity
from megarl.rollout.start import start_driver
from tests.memory import AllocationMeter
from tests.parallel_utils import run_ranks
from tests.resharding import fault_plugin
from tests.resharding.engine_families import SEQUENCES, checkpoint
from tests.resharding.test_bridge import sharded

LAYER_1, LAYER_2 = "model.layers.1.", "model.layers.2."


def _other_expert(tensor: str) -> str:
    """Experts 0 and 1 change places."""
    for mine, other in ((".0.", ".1."), (".1.", ".0.")):
        if f"local_experts{mine}" in tensor:
            return tensor.replace(f"local_experts{mine}", f"local_experts{other}")
    return tensor


def _parts(transfers, out):
    """(transfer, its bytes in the buffer)."""
    at = 0
    for transfer in transfers:
        yield transfer, out[at : at + transfer.nbytes]
        at += transfer.nbytes


class _Sender:
    """Replaces `transport.pack` on a trainer rank with one that does one thing wrong."""

    def __init__(self, fault: str, old: dict[str, torch.Tensor]):
        self.fault, self.old, self.buffers = fault, old, 0

    def __call__(self, transfers, tensors, metas, out):
        self.buffers += 1
        if self.fault == "dropped bucket" and self.buffers == 2:
            out.zero_()
            return
        if self.fault == "interrupted" and self.buffers == 3:
            transport.Link.exchange = _lost
        if self.fault == "stale PP stage" and torch.distributed.get_rank() == 1:
            tensors = self.old
        pack(transfers, tensors, metas, out)
        for transfer, part in _parts(transfers, out):
            name = transfer.give.name
            if self.fault == "one flipped bit" and name == "model.layers.1.self_attn.q_proj.weight":
                part[1001] ^= 4
                self.fault = "done"
            if self.fault == "two swapped experts" and ".mlp.experts." in name and name.startswith(LAYER_1):
                give = transfer.give._replace(tensor=_other_expert(transfer.give.tensor))
                pack([transfer._replace(give=give)], tensors, metas, part)
            if self.fault == "transposed qkv blocks" and name == "model.layers.0.self_attn.k_proj.weight":
                half = len(part) // 2
                part.copy_(torch.cat([part[half:], part[:half]]))
        if self.fault == "truncated last bucket" and any(t.give.name == "lm_head.weight" for t in transfers):
            out[-64:] = 0


def _lost(self, sends=(), receives=()):
    """The connection breaks, once."""
    transport.Link.exchange = exchange
    raise RuntimeError("asked to fail")


pack, exchange = transport.pack, transport.Link.exchange

IN_TRAINER = {
    "dropped bucket": "differ between trainer and engine",
    "stale PP stage": LAYER_2,
    "two swapped experts": "model.layers.1.mlp.experts.0.gate_proj.weight",
    "transposed qkv blocks": "model.layers.0.self_attn.k_proj.weight",
    "truncated last bucket": "lm_head.weight",
    "one flipped bit": "model.layers.1.self_attn.q_proj.weight",
}


def _scored_by_transformers(path: str):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def logprobs(batch):
        found = torch.zeros(len(batch.tokens))
        with torch.no_grad():
            for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
                ids = batch.tokens[None, start:stop]
                scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                found[start + 1 : stop] = scores.gather(1, ids[0, 1:, None]).squeeze(1)
        return found

    return logprobs


def _outcome(action, *arguments) -> str:
    try:
        action(*arguments)
    except (MegarlError, ValueError) as error:
        return str(error)
    return ""


def _with_faults(config, sizes: dict, old: str, new: str, run_dir: str, in_trainer: list[str], in_engine: list[str]):
    """For each fault what `sync` and then `generate` said on rank 0; between faults a good sync of the old weights."""
    found = {}
    model, layout = sharded(new, ParallelSizes(2, **sizes))
    stale, _ = sharded(old, ParallelSizes(2, **sizes))
    parities = {}
    with start_driver(config, Path(run_dir), layout.is_first) as driver:
        driver.wait_until_ready(print)
        parities = {path: Parity(config, 128, _scored_by_transformers(path), driver) for path in (old, new)}
        for version, fault in enumerate(in_trainer + in_engine, start=1):
            bridge = Bridge(stale, layout, SyncConfig(bucket_size_mib=1), driver, parities[old])
            bridge.bucket_bytes = 1 << 18
            fault_plugin.choose("none")
            bridge.connect()
            bridge.sync(version=100 * version)
            bridge.model, bridge.parity = model, parities[new]
            fault_plugin.choose(fault)
            transport.pack = _Sender(fault, stale.tensors) if fault in in_trainer else pack
            said = _outcome(bridge.sync, 100 * version + 1)
            print(layout.rank, fault, said[:300], flush=True)
            transport.pack = pack
            if layout.is_first:
                refusal = _outcome(driver.generate, SEQUENCES[:1], 1, 0.0, 4, 0)
                found[fault] = (said, refusal)
            torch.distributed.barrier()
        fault_plugin.choose("worker takes less")
        found["worker takes less"] = _outcome(Bridge(model, layout, SyncConfig(), driver).connect)
        fault_plugin.choose("none")
    return found


def _measured_sync(config, new: str, run_dir: str, transport_name: str):
    """(rank's peak, engine's peaks, largest raw module) in bytes of an audited sync in buckets of 4 MiB."""
    model, layout = sharded(new, ParallelSizes(2, tp=2))
    with start_driver(config, Path(run_dir), layout.is_first) as driver:
        driver.wait_until_ready(print)
        bridge = Bridge(model, layout, SyncConfig(bucket_size_mib=4, transport=transport_name), driver)
        fault_plugin.choose("none")
        bridge.connect()
        bridge.sync(version=1)  # the audit's factors are made once and kept
        fault_plugin.choose("measure")
        with AllocationMeter() as meter:
            bridge.sync(version=2)
        fault_plugin.choose("none")
    return meter.peak, fault_plugin.measured() if layout.is_first else None


@pytest.mark.parametrize("way", ["gloo", pytest.param("shared_memory", marks=pytest.mark.slow)])
def test_peak_memory_of_a_sync(way, tiny_config, tmp_path, monkeypatch):
    """Two buckets on a trainer rank; two buckets and the largest raw module on an engine."""
    fault_plugin.install(tmp_path / "plugin", monkeypatch)
    old, new = (checkpoint("llama-wide", tmp_path / str(seed), seed) for seed in (0, 1))
    config = tiny_config(
        {"actor": {"model": {"path": str(old), "dtype": "float32"}}, "data": {"max_prompt_length": 24}}
    )
    bucket, module, slack = 4 << 20, 30_016 * 128 * 4, 1 << 19
    ranks = run_ranks(_measured_sync, 2, config, str(new), str(tmp_path / "run"), way, timeout_seconds=200)
    engine = ranks[0][1]
    print({"ranks": [peak for peak, _ in ranks], "engine": engine})
    assert all(0 < peak <= 2 * bucket + slack for peak, _ in ranks)
    assert module < engine["peak"] <= 2 * bucket + module + slack


@pytest.fixture
def faulty(tmp_path, monkeypatch, tiny_config):
    fault_plugin.install(tmp_path / "plugin", monkeypatch)

    def run(family: str, sizes: dict, in_trainer: list[str], in_engine: list[str], engine_tp: int = 1) -> dict:
        old, new = (checkpoint(family, tmp_path / str(seed), seed) for seed in (0, 1))
        config = tiny_config(
            {
                "actor": {"model": {"path": str(old), "dtype": "float32"}},
                "data": {"max_prompt_length": 24},
                "rollout": {"tensor_model_parallel_size": engine_tp},
            }
        )
        arguments = (config, sizes, str(old), str(new), str(tmp_path / "run"), in_trainer, in_engine)
        return run_ranks(_with_faults, 2, *arguments, timeout_seconds=300)[0]

    return run


def test_every_fault_of_a_delivery_is_named(faulty):
    in_engine = ["box lost in the worker", "worker fails half-way", "skipped MoE prepack"]
    found = faulty("qwen3_moe", dict(pp=2), [*IN_TRAINER, "interrupted"], in_engine)
    for number, (fault, named) in enumerate(IN_TRAINER.items(), start=1):
        said, refusal = found[fault]
        assert named in said, (fault, said)
        assert "engine 0 worker 0" in said and f"last good version: {100 * number}" in said
        assert "does not generate" in refusal
    said, refusal = found["box lost in the worker"]
    assert "model.layers.1.self_attn.o_proj.weight" in said and "does not generate" in refusal
    for fault in ("interrupted", "worker fails half-way"):
        said, refusal = found[fault]
        assert said and "does not generate" in refusal, (fault, found[fault])
    assert "engine 0 takes 0 of the 128 elements of model.norm.weight" in found["worker takes less"]
    said, _ = found["skipped MoE prepack"]
    assert "disagree about weight version" in said and "installed them wrongly" in said


def test_engine_workers_that_disagree_are_named():
    alike = [[Hello("0.32", "a", "node", "cpu"), Hello("0.32", "b", "node", "cpu")]]
    assert Bridge.disagreement([*alike, *alike]) == ""
    failed = [Hello("0.32", "a", "node", "cpu"), Hello("0.32", "b", "node", "cpu", "ValueError: float8")]
    assert "engine 0 worker 1 cannot tell where its weights lie (ValueError: float8)" in Bridge.disagreement([failed])
    other_layout = [Hello("0.32", "a", "node", "cpu"), Hello("0.32", "c", "node", "cpu")]
    assert "engine 1 worker 1 lays its weights out differently from engine 0 worker 1" in Bridge.disagreement(
        [*alike, other_layout]
    )
    other_release = [Hello("0.33", "a", "node", "cpu"), Hello("0.32", "b", "node", "cpu")]
    assert "different vLLM releases" in Bridge.disagreement([*alike, other_release])


def test_a_tied_copy_left_behind_is_seen_by_parity(faulty):
    found = faulty("qwen2-tied", dict(tp=2), [], ["tied copy left behind"])
    assert "disagree about weight version" in found["tied copy left behind"][0]


@pytest.mark.slow
def test_a_failed_worker_does_not_leave_the_others_waiting(faulty):
    """All bytes are sent when it fails: only the audit can tell the others, which wait for its verdict."""
    fault = "last worker fails at the end"
    said, refusal = faulty("qwen2-tied", dict(tp=2), [], [fault], engine_tp=2)[fault]
    assert "refused /update_weights" in said and "does not generate" in refusal
