"""Plans between paper-size layouts, without weights: what every rank would send, take and hold besides its model."""

import time
from collections import defaultdict
from dataclasses import dataclass

from resharding_engines import EngineSizes, worker_pieces
from resharding_models import MODELS, Model

from megarl.parallel.coordinates import ParallelSizes
from megarl.resharding.megatron_layout import holdings, pieces_of
from megarl.resharding.pieces import Holding, Piece, buckets
from megarl.resharding.plan import Plan, Sources, make_plan, no_garbage_collection

BUCKET_BYTES = 256 << 20  # the default of sync.bucket_size_mib


@dataclass(frozen=True)
class Case:
    """One trainer and several engines laid out alike, on other nodes: all trainer ranks are equally near."""

    model: str
    source: str  # where the layouts are published
    trainer: ParallelSizes
    engine: EngineSizes
    replicas: int

    @property
    def name(self) -> str:
        t, e = self.trainer, self.engine
        trainer = f"TP{t.tp} PP{t.pp}" + (f" EP{t.ep}" if t.ep > 1 else "")
        engine = f"TP{e.tp}" + (f" PP{e.pp}" if e.pp > 1 else "") + (" EP" if e.expert_parallel else "")
        workers = e.workers * self.replicas
        return f"{self.model}: {t.world_size} ranks ({trainer}) to {workers} ({engine} x {self.replicas})"


# NeMo-RL: docs/about/performance-summary.md of v0.4 and examples/configs/recipes/llm/performance, stages of unequal
# length included. verl: run_qwen2-7b_math_megatron.sh and run_deepseek671b_math_megatron_96gb.sh of
# examples/grpo_trainer. slime: scripts/run-qwen3-235B-A22B.sh (its engines are SGLang's). Context-parallel ranks count
# as data-parallel ones: they hold the same weights.
CASES = [
    Case("Qwen2.5-7B", "verl", ParallelSizes(8, tp=2, pp=2), EngineSizes(tp=2), 4),
    Case("Qwen2.5-32B", "64 to 32 ranks", ParallelSizes(64, tp=8, pp=2), EngineSizes(tp=4), 8),
    Case("Qwen2.5-32B", "NeMo-RL's Qwen3-32B, 1-step off", ParallelSizes(32, tp=4, pp=4), EngineSizes(tp=4), 8),
    Case("Qwen3-30B-A3B", "NeMo-RL, 1-step off", ParallelSizes(16, pp=2, ep=8), EngineSizes(tp=2), 8),
    Case("Qwen3-30B-A3B", "64 ranks, EP8", ParallelSizes(64, ep=8), EngineSizes(tp=4, expert_parallel=True), 8),
    Case("Qwen3-30B-A3B", "64 ranks, EP8", ParallelSizes(64, ep=8), EngineSizes(tp=4), 8),
    Case(
        "Qwen3-235B-A22B",
        "NeMo-RL, 1-step off",
        ParallelSizes(128, tp=4, pp=8, ep=16, first_stage_layers=11, last_stage_layers=11),
        EngineSizes(tp=8),
        16,
    ),
    Case(
        "Qwen3-235B-A22B",
        "slime's trainer",
        ParallelSizes(64, tp=4, pp=4, ep=16, last_stage_layers=22),
        EngineSizes(tp=8, pp=2, expert_parallel=True),
        4,
    ),
    Case(
        "DeepSeek-V3",
        "verl, 96 GPUs",
        ParallelSizes(96, tp=8, pp=12, ep=8, last_stage_layers=6),
        EngineSizes(tp=32, expert_parallel=True),
        3,
    ),
    Case(
        "DeepSeek-V3",
        "NeMo-RL, 1-step off, with engine EP",
        ParallelSizes(256, pp=16, ep=16, first_stage_layers=3, last_stage_layers=2),
        EngineSizes(tp=32, expert_parallel=True),
        8,
    ),
    Case(
        "DeepSeek-V3",
        "512 to 256 ranks, EP32",
        ParallelSizes(512, pp=16, ep=32, first_stage_layers=3, last_stage_layers=2),
        EngineSizes(tp=32, expert_parallel=True),
        8,
    ),
    Case(
        "DeepSeek-V3",
        "512 to 256 ranks, EP32",
        ParallelSizes(512, pp=16, ep=32, first_stage_layers=3, last_stage_layers=2),
        EngineSizes(tp=32),
        8,
    ),
]
# Under --quick: no case of more than a few seconds.
QUICK = [case for case in CASES if case.model in ("Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-30B-A3B")] + [CASES[-2]]


def simulate(case: Case, repetitions: int) -> list[dict]:
    """One result for each design, `planned` and `gathered`.

    Planning seconds are CPU seconds of one rank, the fastest of `repetitions`: the layouts of all trainer ranks, the
    sources, the plan and its digest.
    """
    model = MODELS[case.model]()
    destinations = [
        Holding((case.trainer.world_size + worker,), worker_pieces(model, case.engine, worker))
        for worker in range(case.engine.workers)
    ]
    seconds = []
    for _ in range(repetitions):
        started = time.process_time()
        with no_garbage_collection():  # as in `Bridge`
            trainer = holdings(model.table, model.shapes, case.trainer, "te")
            plan = make_plan(Sources(trainer), destinations, model.metas, BUCKET_BYTES)
            assert plan.digest
        seconds.append(time.process_time() - started)
    return [
        planned(case, model, plan, destinations) | {"planning_seconds": min(seconds)},
        gathered(case, model, destinations),
    ]


def nbytes(model: Model, pieces: list[Piece]) -> int:
    """Of the distinct boxes among these pieces."""
    return sum(
        piece.numel * model.metas[piece.name].itemsize for piece in {(p.name, p.box): p for p in pieces}.values()
    )


def needed_by(model: Model, destinations: list[Holding]) -> dict[int, int]:
    """The bytes that each destination holds: what it has to take at least."""
    return {holding.ranks[0]: nbytes(model, holding.pieces) for holding in destinations}


def planned(case: Case, model: Model, plan: Plan, destinations: list[Holding]) -> dict:
    """The trainer serves the first replica; each of the others gets its weights from the one before it."""
    needed = needed_by(model, destinations)
    everything = [piece for holding in destinations for piece in holding.pieces]
    taken, sent = plan.ingress(), plan.egress()
    ranks = case.trainer.world_size
    mean = sum(sent.values()) / ranks
    return {
        "case": case.name,
        "layouts": case.source,
        "design": "planned",
        "kind": "simulated",
        "model_bytes": model.nbytes,
        "ingress_bytes_max": max(taken.values()),
        "ingress_lower_bound": max(needed.values()),
        "ingress_over_bound": max(taken[rank] / needed[rank] for rank in needed),
        "egress_bytes_max": max(sent.values()),
        "egress_bytes_mean": mean,
        "egress_bytes_total": sum(sent.values()),
        # The ranks of a stage are the only ones that have its layers: no choice of sources is more even than this.
        "egress_bytes_max_least": least_largest_egress(case.trainer, plan),
        "peak_extra_bytes": peak_extra_bytes(plan),
        "fallback_bytes": model.nbytes - nbytes(model, everything),  # no worker has a place for them
        "transfers": sum(len(transfers) for transfers in plan.rounds),
        "seconds": None,
    }


def least_largest_egress(trainer: ParallelSizes, plan: Plan) -> float:
    """What the busiest stage sends, shared out evenly over its ranks."""
    per_stage = trainer.world_size // trainer.pp
    sent = defaultdict(int)
    for rank, count in plan.egress().items():
        sent[rank // per_stage] += count
    return max(sent.values()) / per_stage


def peak_extra_bytes(plan: Plan) -> int:
    """Most bytes that a process has in buffers: those of one round on their way, those of the next being packed."""
    in_round = [defaultdict(int) for _ in plan.rounds]
    for transfers, held in zip(plan.rounds, in_round):
        for transfer in transfers:
            held[transfer.source] += transfer.nbytes
            held[transfer.destination] += transfer.nbytes
    following = [*in_round[1:], {}]
    return max(count + b.get(rank, 0) for a, b in zip(in_round, following) for rank, count in a.items())


def gathered(case: Case, model: Model, destinations: list[Holding]) -> dict:
    """Buckets of whole tensors, put together on rank 0 and broadcast to each replica in turn.

    A broadcast counts once for its root: what a chain or a tree passes on is the engines' egress.
    """
    needed = needed_by(model, destinations)
    first = nbytes(model, pieces_of(model.table, model.shapes, case.trainer, 0, "te"))
    runs = [sum(meta.nbytes for meta in run) for run in buckets(list(model.metas.values()), BUCKET_BYTES)]
    broadcast, gathered_bytes = model.nbytes * case.replicas, model.nbytes - first
    return {
        "case": case.name,
        "layouts": case.source,
        "design": "gathered",
        "kind": "simulated",
        "model_bytes": model.nbytes,
        "ingress_bytes_max": model.nbytes,
        "ingress_lower_bound": max(needed.values()),
        "ingress_over_bound": max(model.nbytes / count for count in needed.values()),
        "egress_bytes_max": broadcast,
        "egress_bytes_mean": (broadcast + gathered_bytes) / case.trainer.world_size,
        "egress_bytes_total": broadcast + gathered_bytes,
        "egress_bytes_max_least": None,
        # Rank 0 holds a bucket (or a tensor larger than one) and what arrives for it.
        "peak_extra_bytes": max(runs) + min(max(runs), BUCKET_BYTES),
        "fallback_bytes": 0,
        "transfers": None,
        "planning_seconds": None,
        "seconds": None,
    }
