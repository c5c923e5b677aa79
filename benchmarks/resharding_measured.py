"""Real transfers over gloo between processes of this machine: the designs in turn, on the same model.

`sync`: two trainer ranks (TP2, a real Megatron model) to two workers with a TP2 engine's parameters.
    planned   boxes from shard to shard, as `Bridge` sends them in rounds of one bucket
    gathered  whole tensors on rank 0 by our own `gather`, broadcast to the workers, which take their boxes out
    mbridge   whole tensors by mbridge's `export_weights`, on every rank; rank 0 broadcasts them in the same buckets
`convert`: between two Megatron layouts of the same two ranks, TP2 to PP2.
    planned   a plan among the ranks
    megatron  megatron.core.resharding over its gloo service, its plan kept from the first call

A repetition's seconds are wall time from a barrier to the last process's end; arms take turns within a repetition.
Plans are made beforehand. Nothing is installed in an engine: that part is the same for all.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from logprob_measured import peak_extra_mib
from resharding_engines import EngineSizes, worker_pieces
from resharding_models import Model, gqa_model
from resharding_simulated import nbytes
from transformers import Qwen2Config

from megarl.config.model import ModelConfig
from megarl.models.build import build
from megarl.parallel import layout as layouts
from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding import megatron_layout, transport
from megarl.resharding.gathered import gather
from megarl.resharding.megatron_layout import ShardedModel
from megarl.resharding.pieces import Holding, TensorMeta, buckets, unpack
from megarl.resharding.plan import Sources, intersect, make_plan

BUCKET_BYTES = 64 << 20  # several rounds for a model of some hundred MB
TRAINERS, WORKERS = 2, 2
ENGINE = EngineSizes(tp=WORKERS)


def model(quick: bool) -> Model:
    """Layers of Qwen2.5-0.5B's shape, an untied head."""
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2 if quick else 8,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=16_384 if quick else 65_536,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    return gqa_model(f"{config.num_hidden_layers} layers of Qwen2.5-0.5B", config)


def measure(quick: bool, with_mbridge: bool) -> list[dict]:
    """One result for each case and design."""
    size = TRAINERS + WORKERS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, args=(size, folder, quick, with_mbridge), nprocs=size)
        found = [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(size)]
    case = model(quick)
    what = f"{case.name}, {case.nbytes / 1e6:.0f} MB"
    names = {
        "sync": f"sync, {what}: {TRAINERS} ranks (TP2) to {WORKERS} (TP2)",
        "convert": f"convert, {what}: {TRAINERS} ranks, TP2 to PP2",
    }
    return [
        _together(case, name, design, [process[use][design] for process in found if use in process])
        for use, name in names.items()
        for design in found[0][use]
    ]


def _together(case: Model, name: str, design: str, processes: list[dict]) -> dict:
    """The results of all processes: bytes and memory of the busiest one, the last one's time."""
    slowest = [max(times) for times in zip(*(process["seconds"] for process in processes))]
    sent = [process["sent"] for process in processes[:TRAINERS]]
    takers = processes[-WORKERS:]
    return {
        "case": name,
        "layouts": "this machine",
        "design": design,
        "kind": "measured",
        "model_bytes": case.nbytes,
        "ingress_bytes_max": max(process["taken"] for process in takers),
        "ingress_lower_bound": max(process["needed"] for process in takers),
        "ingress_over_bound": max(process["taken"] / process["needed"] for process in takers),
        "egress_bytes_max": max(sent),
        "egress_bytes_mean": sum(sent) / len(sent),
        "egress_bytes_total": sum(sent),
        "egress_bytes_max_least": None,
        "peak_extra_bytes": max(process["peak_extra_bytes"] for process in processes),
        "fallback_bytes": 0,
        "transfers": None,
        "planning_seconds": processes[0]["planning_seconds"],
        "seconds": statistics.median(slowest),
        "seconds_min": min(slowest),
        "repetitions": len(slowest),
    }


def _process(index: int, size: int, folder: str, quick: bool, with_mbridge: bool) -> None:
    torch.set_num_threads(1)
    case, repetitions = model(quick), 3 if quick else 9
    # The meeting point of all processes; trainers have a default group of their own besides.
    store = dist.FileStore(str(Path(folder, "links")), size)
    found = {"sync": _sync(index, size, case, folder, store, repetitions, with_mbridge)}
    if index < TRAINERS:
        found["convert"] = _convert(index, case, folder, repetitions)
        dist.destroy_process_group()
    Path(folder, f"{index}.json").write_text(json.dumps(found))


# --- trainer to engine --------------------------------------------------------------------------------------------


def _sync(
    index: int, size: int, case: Model, folder: str, store: dist.Store, repetitions: int, with_mbridge: bool
) -> dict[str, dict]:
    everybody = transport.Link(store, "everybody", index, size)
    broadcasting = None
    if index != 1:  # rank 0 and the workers
        broadcasting = transport.Link(store, "broadcast", max(0, index - TRAINERS + 1), 1 + WORKERS)
    make = _trainer_arms if index < TRAINERS else _worker_arms
    arms = make(index, case, folder, store, everybody, broadcasting, with_mbridge)
    return _take_turns(arms, everybody.group.barrier, repetitions)


def _take_turns(arms: dict[str, dict], barrier: Callable, repetitions: int) -> dict[str, dict]:
    """Run every arm's `run`, one after the other in each repetition: its figures, with seconds and memory."""
    held = {}
    for design, arm in arms.items():

        def once(arm=arm):
            barrier().wait()
            arm["run"]()

        arm["peak_extra_bytes"] = int(peak_extra_mib(once) * 2**20)
        held[design] = {name: tensor.clone() for name, tensor in arm.get("tensors", {}).items()}
        for tensor in arm.get("tensors", {}).values():
            tensor.zero_()
        arm["seconds"] = []
    _check_same(held)
    for _ in range(repetitions):
        for arm in arms.values():
            barrier().wait()
            started = time.perf_counter()
            arm["run"]()
            arm["seconds"].append(time.perf_counter() - started)
    keys = ("seconds", "peak_extra_bytes", "sent", "taken", "needed", "planning_seconds")
    return {design: {key: arm.get(key) for key in keys} for design, arm in arms.items()}


def _check_same(held: dict[str, dict[str, torch.Tensor]]) -> None:
    """Every design left the same bits."""
    first, *others = held.values()
    for other in others:
        for name, tensor in first.items():
            assert tensor.any() and torch.equal(tensor, other[name]), f"{name} differs between {list(held)}"


def _sharded(case: Model, sizes, rank: int, folder: str):
    """A real Megatron model, randomly initialised, under a layout: (module, its ShardedModel)."""

    if not dist.is_initialized():
        store = dist.FileStore(str(Path(folder, "trainers")), TRAINERS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)
    layout = layouts.join(sizes, False, seed=0)
    module = build(case.config, ModelConfig(path="", dtype="bfloat16", transformer_impl="local"), layout)
    module.requires_grad_(False)
    for name, parameter in module.named_parameters():
        if name.endswith("linear_qkv.bias"):  # zeros would arrive whatever is sent
            parameter.normal_()
    return module, ShardedModel(layout, case.table, case.shapes, dict(module.named_parameters()))


def _plan(case: Model, trainer, destinations) -> tuple:
    """(plan, CPU seconds, the fastest of three)."""

    seconds = []
    for _ in range(3):
        started = time.process_time()
        held = megatron_layout.holdings(case.table, case.shapes, trainer.layout.sizes, trainer.spelling)
        plan = make_plan(Sources(held), destinations, case.metas, BUCKET_BYTES)
        assert plan.digest
        seconds.append(time.process_time() - started)
    return plan, min(seconds)


def _workers(case: Model):

    return [Holding((TRAINERS + w,), worker_pieces(case, ENGINE, w)) for w in range(WORKERS)]


def _trainer_arms(rank, case, folder, store, everybody, broadcasting, with_mbridge) -> dict[str, dict]:

    module, sharded = _sharded(case, ParallelSizes(TRAINERS, tp=TRAINERS), rank, folder)
    plan, planning_seconds = _plan(case, sharded, _workers(case))
    runs = buckets(list(case.metas.values()), BUCKET_BYTES)

    def planned() -> None:
        underway = None
        for sends in plan.sends(rank):
            outgoing = []
            for peer, transfers in sends.items():
                buffer = torch.empty(transport.nbytes(transfers), dtype=torch.uint8)
                transport.pack(transfers, sharded.tensors, case.metas, buffer)
                outgoing.append((peer, buffer))
            if underway is not None:
                underway()
            underway = everybody.exchange(sends=outgoing)
        underway()

    def gathered() -> None:
        for _, flat in gather(sharded, runs):
            if flat is not None:
                broadcasting.broadcast(flat)

    broadcast = case.nbytes if rank == 0 else 0
    to_rank_0 = case.nbytes - nbytes(case, sharded.pieces_of(0)) if rank else 0
    arms = {
        "planned": dict(run=planned, sent=plan.egress().get(rank, 0), planning_seconds=planning_seconds),
        "gathered": dict(run=gathered, sent=broadcast + to_rank_0),
    }
    if with_mbridge:
        bridge = _mbridge(case, module.config)
        names = [name for name, _ in bridge.export_weights([module])]
        if rank == 0:
            store.set("mbridge", json.dumps(names))
        exported = buckets([case.metas[name] for name in names], BUCKET_BYTES)

        def mbridge() -> None:
            tensors = bridge.export_weights([module])
            for run in exported:
                flat, at = torch.empty(sum(meta.nbytes for meta in run), dtype=torch.uint8), 0
                for meta in run:
                    _, tensor = next(tensors)
                    flat[at : at + meta.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
                    at += meta.nbytes
                if rank == 0:
                    broadcasting.broadcast(flat)
            assert next(tensors, None) is None

        # Its all-gather sends a rank's shards to the one other rank.
        shards = sum(p.nbytes for p in module.parameters() if getattr(p, "tensor_model_parallel", False))
        arms["mbridge"] = dict(run=mbridge, sent=broadcast + shards)
    return arms


def _mbridge(case: Model, transformer_config):
    """mbridge's Qwen2, taught the names of Megatron's own layers: it knows TransformerEngine's."""
    from mbridge.models.qwen2 import Qwen2Bridge

    class LocalQwen2Bridge(Qwen2Bridge):
        _MLP_MAPPING = Qwen2Bridge._MLP_MAPPING | {
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
        }
        _OTHER_MAPPING = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}

        def _build_config(self):
            return transformer_config

    return LocalQwen2Bridge(case.config, dtype=torch.bfloat16)


def _worker_arms(index, case, folder, store, everybody, broadcasting, with_mbridge) -> dict[str, dict]:

    destinations = _workers(case)
    pieces = destinations[index - TRAINERS].pieces
    held = megatron_layout.holdings(case.table, case.shapes, ParallelSizes(TRAINERS, tp=TRAINERS), "local")
    plan = make_plan(Sources(held), destinations, case.metas, BUCKET_BYTES)
    sizes: dict[str, int] = {}
    for piece in pieces:
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + piece.numel
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    by_name = {piece.name: piece for piece in pieces}

    def post(receives):
        buffers = {peer: torch.empty(transport.nbytes(ts), dtype=torch.uint8) for peer, ts in receives.items()}
        return receives, buffers, everybody.exchange(receives=list(buffers.items()))

    def planned() -> None:
        """The next round is on its way while one is put in place, as in the engine's plugin."""
        pending = None
        for receives in [*plan.receives(index), None]:
            following = None if receives is None else post(receives)
            if pending is not None:
                transfers, buffers, wait = pending
                wait()
                for peer, buffer in buffers.items():
                    transport.scatter(transfers[peer], buffer, tensors, case.metas)
            pending = following

    def whole_tensors(runs: list[list[TensorMeta]]) -> None:
        for run in runs:
            flat = torch.empty(sum(meta.nbytes for meta in run), dtype=torch.uint8)
            broadcasting.broadcast(flat)
            for name, whole in unpack(run, flat).items():
                piece = by_name[name]
                piece.view(tensors[piece.tensor]).copy_(piece.of(whole))

    runs = buckets(list(case.metas.values()), BUCKET_BYTES)
    common = dict(tensors=tensors, needed=nbytes(case, pieces))
    arms = {
        "planned": dict(run=planned, taken=plan.ingress()[index], **common),
        "gathered": dict(run=lambda: whole_tensors(runs), taken=case.nbytes, **common),
    }
    if with_mbridge:
        names = json.loads(store.get("mbridge"))
        exported = buckets([case.metas[name] for name in names], BUCKET_BYTES)
        arms["mbridge"] = dict(run=lambda: whole_tensors(exported), taken=case.nbytes, **common)
    return arms


# --- Megatron to Megatron -----------------------------------------------------------------------------------------


def _convert(rank: int, case: Model, folder: str, repetitions: int) -> dict[str, dict]:
    from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    source_module, source = _sharded(case, ParallelSizes(TRAINERS, tp=2), rank, folder)
    module, destination = _sharded(case, ParallelSizes(TRAINERS, pp=2), rank, folder)
    plan, planning_seconds = _plan(case, source, destination.holdings)

    def planned() -> None:
        transport.exchange_among_ranks(plan, rank, source.tensors, destination.tensors, case.metas, torch.device("cpu"))

    service = GlooCopyService()
    started = time.process_time()
    theirs = build_centralized_reshard_plan(source_module, module)
    their_planning = time.process_time() - started

    def megatron() -> None:
        execute_reshard_plan(theirs, source_module, module, service)

    received = sum(
        module.get_parameter(op.param_name)[op.my_slice].nbytes for op in theirs.recv_ops if op.peer_rank != rank
    )
    sent = sum(
        source_module.get_parameter(op.param_name)[op.my_slice].nbytes for op in theirs.send_ops if op.peer_rank != rank
    )
    from_others = sum(t.nbytes for t in plan if t.destination == rank != t.source)
    held = {p.name: p for p in source.pieces}
    needed = nbytes(case, destination.pieces) - sum(
        _common(piece, held[piece.name]) for piece in destination.pieces if piece.name in held
    )
    common = dict(tensors=destination.tensors, needed=needed)
    arms = {
        "planned": dict(
            run=planned, sent=plan.egress().get(rank, 0), taken=from_others, planning_seconds=planning_seconds, **common
        ),
        "megatron": dict(run=megatron, sent=sent, taken=received, planning_seconds=their_planning, **common),
    }
    return _take_turns(arms, lambda: dist.barrier(async_op=True), repetitions)


def _common(a, b) -> int:
    """Bytes that two pieces of one tensor have in common (bfloat16)."""

    box = intersect(a.box, b.box)
    count = 2 if box else 0
    for start, stop in box or ():
        count *= stop - start
    return count
