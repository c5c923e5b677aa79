"""The bridge: every new policy version from the Megatron shards into the engines' shards, audited at every sync.

    bridge = Bridge(actor.sharded, layout, config.sync, driver)
    bridge.connect()                 # once, when the engines are ready: layouts, plan, communicators
    bridge.sync(version=step)        # every step

`planned`: each engine worker gets the boxes that it needs, straight from the shards that hold them. `gathered`: whole
tensors through rank 0, and through vLLM's own loader; slower, and the oracle that the planned mode is tested against.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from megarl.config.rollout import SyncConfig
from megarl.errors import MegarlError
from megarl.parallel import device
from megarl.parallel.collectives import broadcast_from_first
from megarl.parallel.layout import Layout
from megarl.resharding import handshake, transport
from megarl.resharding.audit import Ledger
from megarl.resharding.gathered import gather
from megarl.resharding.megatron_layout import ShardedModel
from megarl.resharding.parity import Parity
from megarl.resharding.pieces import Holding, TensorMeta, buckets
from megarl.resharding.plan import Plan, Sources, group_by, make_plan, no_garbage_collection, whole
from megarl.resharding.shared_memory import SharedWriter
from megarl.resharding.vllm_layout import EngineLayout

_POLL_SECONDS = 0.05
_IDENTITY_BYTES = 128
_NAMED = 8  # lines of an audit's error that name tensors


class _Setup(msgspec.Struct):
    """What rank 0 learned from the engines and every rank needs."""

    port: int
    sizes: list[int]  # workers of each replica
    beside: list[list[bool]]  # whether each worker is on rank 0's node
    devices: list[list[str]]  # of each worker
    layouts: list[list[str]]  # digest of each replica's workers
    known: dict[str, EngineLayout]
    error: str = ""


@dataclass(eq=False)
class _Replica:
    """One engine as this rank sees it."""

    index: int
    workers: int
    plan: Plan  # its destinations are numbered from world_size on
    ledger: Ledger
    metas: dict[str, TensorMeta]  # in the types that this engine takes
    places: list[torch.Tensor]  # of each worker's pieces in the ledger
    upstream: str  # "trainer", "engine" or "memory"
    senders: list[int]  # trainer ranks that are members of the link, rank 0 first
    door_ranks: list[int]  # with upstream "memory", of each worker the rank beside it
    link: transport.Link | None = None
    doors: dict[int, SharedWriter] = field(default_factory=dict)  # of the workers that this rank is beside


class Bridge:
    """Collective: all trainer ranks call every method together."""

    def __init__(self, model: ShardedModel, layout: Layout, config: SyncConfig, driver, parity: Parity | None = None):
        """Open, on rank 0, the meeting point; engines need not be ready yet.

        Args:
            driver: the rank's rollout driver.
            parity: checks what the engines make of the weights, after the syncs that it names.

        Raises:
            ValueError: `sync.port` is taken; `sync.transport` needs GPUs and there are none.
        """
        if config.transport in ("nccl", "cuda_ipc") and not device.HAS_CUDA:
            raise ValueError(
                f"sync.transport={config.transport} needs GPUs, and this machine shows none; set it to auto, gloo or "
                "shared_memory"
            )
        self.model, self.layout, self.config, self.driver, self.parity = model, layout, config, driver, parity
        self.bucket_bytes = config.bucket_size_mib << 20
        self.replicas: list[_Replica] = []
        self.last_good_version: int | None = None
        self._syncs = 0
        self._own_audit_seconds = self._engine_audit_seconds = 0.0  # of the last audit
        self._store = transport.host(config.port) if driver.num_engines else None

    def connect(self) -> None:
        """Meet the workers of every engine, agree on a plan, join the communicators; all engines must be ready.

        Raises:
            ValueError: the engines disagree among each other, or do not take the checkpoint that the trainer holds.
            MegarlError: an engine died or refused.
        """
        pending = None
        if self.driver.num_engines:
            infos = [self._init_info(replica) for replica in range(self.driver.num_engines)]
            pending = self.driver.init_weight_transfer(infos)
        setup = self._share(self._hear_all(pending) if self.driver.num_engines else None)
        if not setup.sizes:
            return
        if setup.error:
            raise ValueError(setup.error)
        if self._store is None:
            self._store = transport.visit(transport.address(), setup.port)
        self._rank_devices = self._gather_devices()
        self._check_transport(setup)
        self._plan(setup)
        self._check_agreement()
        self._link(setup, pending)
        if pending is not None:
            pending.result()
        dist.barrier()
        for replica in self.replicas:
            for door in replica.doors.values():
                door.unlink()

    def sync(self, version: int) -> dict[str, float]:
        """Install the policy's present weights in every engine as `version`; returns when all of them answer with it.

        Returns:
            sync/egress_mib (what all trainer ranks sent), sync/transfer_seconds (until this rank's last byte is taken),
            sync/seconds (until the engines answer); when audited sync/audit_seconds, of that the checksums: this rank's
            and the slowest worker's; and what `Parity.check` returns when it is due.

        Raises:
            MegarlError: an engine died or refused, or holds (audit) or computes (parity) something else.
        """
        if not self.replicas:
            return {}
        audited = self._audits_now()
        pending = None
        if self.driver.num_engines:
            pending = self.driver.begin_sync(version, [r.plan.digest for r in self.replicas], audited)
            pending.wait_until_started()
        started = device.now()
        broken = self._transfer()
        sent = device.now()
        self._own_audit_seconds = self._engine_audit_seconds = 0.0
        complaint = self._audit(broken) if audited else ""
        self._conclude(version, pending, broken, complaint)
        done = device.now()
        parity = self.parity.check(version) if self.parity and self.parity.is_due(self._syncs) else {}
        self._syncs += 1
        self.last_good_version = version
        metrics = {
            "sync/egress_mib": self._egress() / 2**20,
            "sync/transfer_seconds": sent - started,
            "sync/seconds": done - started,
        }
        if audited:
            metrics["sync/audit_seconds"] = self._own_audit_seconds + self._engine_audit_seconds
        return metrics | parity

    # --- connecting -------------------------------------------------------------------------------------------------

    def _init_info(self, replica: int) -> dict:
        return dict(
            host=transport.address(),
            port=self._store.port,
            replica=replica,
            mode=self.config.mode,
            tensors=[[meta.name, list(meta.shape), meta.dtype] for meta in self.model.metas],
            bucket_bytes=self.bucket_bytes,
        )

    def _hear_all(self, pending) -> _Setup:
        """Rank 0: wait for every worker's hello; an engine that fails meanwhile is reported at once."""
        sizes = self.driver.engine_world_sizes
        keys = self._wait_for("hello", sizes, pending)
        hellos = [[msgspec.json.decode(self._store.get(k), type=handshake.Hello) for k in names] for names in keys]
        layouts = [[hello.layout for hello in replica] for replica in hellos]
        known = {
            digest: msgspec.json.decode(self._store.get(f"layout/{digest}"), type=EngineLayout)
            for digest in dict.fromkeys(d for replica in layouts for d in replica)
        }
        beside = [[hello.node == socket.gethostname() for hello in replica] for replica in hellos]
        devices = [[hello.device for hello in replica] for replica in hellos]
        setup = _Setup(self._store.port, sizes, beside, devices, layouts, known)
        setup.error = self.disagreement(hellos) or self._not_covered(setup)
        if setup.error:
            self._tell_all(setup, lambda replica, worker: handshake.Program(error=setup.error))
        return setup

    def _wait_for(self, word: str, sizes: list[int], pending) -> list[list[str]]:
        """Rank 0: until every worker has written its key `word/replica/worker`; returns the keys."""
        keys = [[f"{word}/{r}/{w}" for w in range(size)] for r, size in enumerate(sizes)]
        while not self._store.check([key for names in keys for key in names]):
            pending.raise_if_failed()
            time.sleep(_POLL_SECONDS)
        return keys

    @staticmethod
    def disagreement(hellos: list[list[handshake.Hello]]) -> str:
        """Which worker cannot take part, or how workers at one place of different engines differ; empty when neither.

        Args:
            hellos: [engine][worker].
        """
        for r, workers in enumerate(hellos):
            for w, hello in enumerate(workers):
                if hello.error:
                    return (
                        f"engine {r} worker {w} cannot tell where its weights lie ({hello.error}); if this is the "
                        "model's loader, set sync.mode=gathered"
                    )
        versions = {hello.vllm: f"engine {r} worker {w}" for r, ws in enumerate(hellos) for w, hello in enumerate(ws)}
        if len(versions) > 1:
            return f"the engine workers run different vLLM releases: {versions}; give all of them the same"
        for r, workers in enumerate(hellos):
            for w, hello in enumerate(workers):
                if len(workers) == len(hellos[0]) and hello.layout != hellos[0][w].layout:
                    return (
                        f"engine {r} worker {w} lays its weights out differently from engine 0 worker {w}, though both "
                        "have the same place; the engines must run the same model, dtype, quantisation and flags"
                    )
        return ""

    def _not_covered(self, setup: _Setup) -> str:
        """Whether some engine takes less than the whole model."""
        if self.config.mode == "gathered":
            return ""
        for r, digests in enumerate(setup.layouts):
            covered: dict[str, dict[tuple, int]] = {}
            for digest in digests:
                layout = setup.known[digest]
                for piece in layout.pieces:
                    covered.setdefault(piece.name, {})[piece.box] = piece.numel
                for name in layout.whole:
                    covered[name] = {(): self._metas[name].numel}
            for meta in self.model.metas:
                held = sum(covered.get(meta.name, {}).values())
                if held < meta.numel:
                    return (
                        f"engine {r} takes {held} of the {meta.numel} elements of {meta.name}: its model is not the "
                        "trainer's; start it from the same checkpoint (actor.model.path)"
                    )
        return ""

    @property
    def _metas(self) -> dict[str, TensorMeta]:
        return {meta.name: meta for meta in self.model.metas}

    def _share(self, setup: _Setup | None) -> _Setup:
        """Rank 0's setup on every rank; without engines an empty one."""
        if self.layout.is_first:
            setup = setup or _Setup(0, [], [], [], [], {})
            blob = torch.frombuffer(bytearray(msgspec.json.encode(setup)), dtype=torch.uint8)
            broadcast_from_first(blob, torch.uint8)
            return setup
        return msgspec.json.decode(bytes(broadcast_from_first(None, torch.uint8).numpy()), type=_Setup)

    @no_garbage_collection()
    def _plan(self, setup: _Setup) -> None:
        """One plan for each distinct engine; the same on every rank, without exchange."""
        sources = Sources(self.model.holdings)
        plans: dict[tuple, tuple] = {}
        head = 0  # of the present chain of engines
        for index, digests in enumerate(setup.layouts):
            upstream = self._upstream(index, setup)
            head = head if upstream == "engine" else index
            doors = [self._door(setup, index, w) for w in range(len(digests))] if upstream == "memory" else []
            # Buffers are passed on as they came: wherever an engine is, it takes them by the plan of its chain's head.
            key = (*digests, *setup.beside[head], *doors)
            if key not in plans:
                layouts = [setup.known[digest] for digest in digests]
                plans[key] = self._plan_engine(sources, layouts, setup.beside[head], doors, sum(setup.sizes))
            plan, ledger, metas, places = plans[key]
            fed = upstream == "trainer" and self.config.mode == "planned"
            senders = sorted({0, *doors} | ({t.source for t in plan} if fed else set()))
            self.replicas.append(_Replica(index, len(digests), plan, ledger, metas, places, upstream, senders, doors))

    def _plan_engine(
        self, sources: Sources, layouts: list[EngineLayout], beside: list[bool], doors: list[int], workers: int
    ) -> tuple:
        world, metas = self.layout.world_size, self._metas
        if self.config.mode == "gathered":
            holding = Holding((0,), [whole(meta.name, meta.shape) for meta in metas.values()])
            plan = make_plan(sources, [holding], metas)
            ledger = Ledger(plan)
            places = torch.tensor([ledger.places[piece.name, piece.box] for piece in holding.pieces])
            return plan, ledger, metas, [places] * len(layouts)
        for layout in layouts:
            for piece in layout.pieces:
                if layout.dtypes[piece.tensor] != metas[piece.name].dtype:
                    metas[piece.name] = TensorMeta(piece.name, metas[piece.name].shape, layout.dtypes[piece.tensor])
        holdings = [
            Holding((world + worker,), handshake.destination_pieces(layout, metas))
            for worker, layout in enumerate(layouts)
        ]
        local = transport.ranks_per_node(world)

        def distance(source: int, destination: int) -> int:
            worker = destination - world
            if doors and source == doors[worker]:
                return 0
            return 1 if source < local and beside[worker] else 2

        limit = self.bucket_bytes
        if doors:  # two buffers for each worker beside a rank, and what it sends: together two buckets
            limit = max(1, 2 * self.bucket_bytes // (2 * -(-workers // min(local, world)) + 1))
        plan = make_plan(sources, holdings, metas, limit, distance)
        ledger = Ledger(plan)
        places = [torch.tensor([ledger.places[p.name, p.box] for p in holding.pieces]) for holding in holdings]
        return plan, ledger, metas, places

    def _upstream(self, index: int, setup: _Setup) -> str:
        if self.config.mode == "gathered":
            return "trainer"
        if self._transport(setup) in ("shared_memory", "cuda_ipc"):
            return "memory"
        alike = index > 0 and setup.layouts[index] == setup.layouts[index - 1]
        return "engine" if alike and self.config.fan_out else "trainer"

    def _transport(self, setup: _Setup) -> str:
        """`auto`: engines on the trainer's GPUs get their weights in memory; others over the network."""
        if self.config.transport != "auto":
            return self.config.transport
        if not device.HAS_CUDA:
            return "gloo"
        return "cuda_ipc" if self._shares_devices(setup) else "nccl"

    def _shares_devices(self, setup: _Setup) -> bool:
        return all(name in self._rank_devices for workers in setup.devices for name in workers)

    def _check_transport(self, setup: _Setup) -> None:
        """Raises ValueError where engines do not lie as `sync.transport` has it."""
        kind = self._transport(setup)
        if kind in ("shared_memory", "cuda_ipc") and not self._shares_devices(setup):
            raise ValueError(
                f"sync.transport={kind} needs every engine worker on the device of a trainer rank, and some are on "
                "others; set sync.transport=auto"
            )
        if kind == "shared_memory" and device.HAS_CUDA:
            raise ValueError("sync.transport=shared_memory is for engines on the CPU; set sync.transport=auto")
        if kind == "nccl" and self._shares_devices(setup):
            raise ValueError(
                "sync.transport=nccl allows no two processes on one GPU, and the engines share the trainer's; set "
                "sync.transport=auto, or rollout.placement=disaggregated"
            )

    def _gather_devices(self) -> list[str]:
        """`transport.identity` of every rank's device."""
        mine = torch.zeros(_IDENTITY_BYTES, dtype=torch.uint8)
        text = transport.identity(device.current()).encode()[:_IDENTITY_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.layout.world_size)]
        dist.all_gather(everyone, mine)
        return [bytes(one.numpy()).rstrip(b"\0").decode() for one in everyone]

    def _door(self, setup: _Setup, replica: int, worker: int) -> int:
        """The trainer rank on a worker's device; of several (on a CPU) they take turns."""
        beside = [rank for rank, name in enumerate(self._rank_devices) if name == setup.devices[replica][worker]]
        return beside[(sum(setup.sizes[:replica]) + worker) % len(beside)]

    def _check_agreement(self) -> None:
        """Raises AssertionError when ranks planned differently: then their layouts differ, which is our mistake."""
        mine = [int(r.plan.digest[:15], 16) for r in self.replicas]
        digests = torch.tensor(mine, dtype=torch.int64, device=device.current())
        least, largest = digests.clone(), digests.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(least, largest), f"the trainer ranks made different plans; this one: {mine}"

    def _link(self, setup: _Setup, pending) -> None:
        rank, kind = self.layout.rank, self._transport(setup)
        for replica in self.replicas:
            self._open_doors(replica)
        if rank == 0:
            self._tell_all(setup, lambda r, w: self._program(self.replicas[r], w, setup))
            self._wait_for("joining", setup.sizes, pending)
        for replica in self.replicas:
            if rank in replica.senders:
                backend = "nccl" if kind == "nccl" else "gloo"
                replica.link = transport.Link(
                    self._store,
                    f"engine/{replica.index}",
                    replica.senders.index(rank),
                    len(replica.senders) + replica.workers,
                    backend,
                )

    def _open_doors(self, replica: _Replica) -> None:
        """The shared buffers to those workers for which this rank is the door; rank 0 reads of them in the store."""
        for worker, rank in enumerate(replica.door_ranks):
            if rank != self.layout.rank:
                continue
            largest = max((sum(c for _, c in step.parts) for step in self._steps(replica, worker)), default=0)
            peer = len(replica.senders) + worker
            door = SharedWriter(lambda: replica.link, peer, largest, device.current(), f"{replica.index}-{worker}")
            door.description["door"] = replica.senders.index(rank)
            self._store.set(f"memory/{replica.index}/{worker}", msgspec.json.encode(door.description))
            replica.doors[worker] = door

    def _steps(self, replica: _Replica, worker: int) -> list[handshake.Round]:
        member = {rank: i for i, rank in enumerate(replica.senders)}
        rounds = []
        for by_source in replica.plan.receives(self.layout.world_size + worker):
            parts = [(member.get(source, 0), transport.nbytes(ts)) for source, ts in by_source.items()]
            rounds.append(handshake.Round(parts, [t.take for ts in by_source.values() for t in ts]))
        return rounds

    def _program(self, replica: _Replica, worker: int, setup: _Setup) -> handshake.Program:
        layout = setup.known[setup.layouts[replica.index][worker]]
        following = self.replicas[replica.index + 1] if replica.index + 1 < len(self.replicas) else None
        memory = {}
        if replica.upstream == "memory":
            memory = msgspec.json.decode(self._store.get(f"memory/{replica.index}/{worker}"))
        return handshake.Program(
            digest=replica.plan.digest,
            rounds=[] if self.config.mode == "gathered" else self._steps(replica, worker),
            places=replica.places[worker].tolist(),
            whole=[replica.metas[name] for name in layout.whole],
            members=len(replica.senders) + replica.workers,
            member=len(replica.senders) + worker,
            upstream=replica.upstream,
            has_downstream=following is not None and following.upstream == "engine",
            workers=replica.workers,
            backend="nccl" if self._transport(setup) == "nccl" else "gloo",
            memory=memory,
        )

    def _tell_all(self, setup: _Setup, program_of: Callable[[int, int], handshake.Program]) -> None:
        for replica, size in enumerate(setup.sizes):
            for worker in range(size):
                self._store.set(f"program/{replica}/{worker}", msgspec.json.encode(program_of(replica, worker)))

    # --- one sync ---------------------------------------------------------------------------------------------------

    def _audits_now(self) -> bool:
        match self.config.audit:
            case "every":
                return True
            case "off":
                return False
            case interval:
                return self._syncs % interval == 0

    def _transfer(self) -> list[_Replica]:
        """Send what this rank has for every engine; returns those that are gone (rank 0 will hear why)."""
        if self.config.mode == "gathered":
            return self._send_whole()
        feeds = {"trainer": self._send_boxes, "memory": self._send_through_doors, "engine": lambda replica: True}
        return [replica for replica in self.replicas if not feeds[replica.upstream](replica)]

    def _send_boxes(self, replica: _Replica) -> bool:
        """Round by round: the next buffers are packed while the last ones are on their way."""
        if replica.link is None:
            return True
        base = self.layout.world_size - len(replica.senders)
        underway = lambda: None  # noqa: E731
        for sends in [*replica.plan.sends(self.layout.rank), {}]:
            outgoing = []
            for destination, transfers in sends.items():
                buffer = torch.empty(transport.nbytes(transfers), dtype=torch.uint8, device=device.current())
                transport.pack(transfers, self.model.tensors, replica.metas, buffer)
                outgoing.append((destination - base, buffer.to(replica.link.device)))
            try:
                underway()
                underway = replica.link.exchange(sends=outgoing) if outgoing else lambda: None
            except RuntimeError:  # gloo's and NCCL's word for a dead peer; what packing raises is this rank's own
                replica.link.abort()
                return False
        return True

    def _send_through_doors(self, replica: _Replica) -> bool:
        """Boxes go to the trainer rank beside the worker, which puts them into memory that the worker sees."""
        rank, world = self.layout.rank, self.layout.world_size
        door_of = {world + worker: door for worker, door in enumerate(replica.door_ranks)}
        alive = True
        for number, transfers in enumerate(replica.plan.rounds):
            operations, slots = [], {}
            for destination in range(world, world + replica.workers):
                mine = replica.doors.get(destination - world)
                by_source = group_by([t for t in transfers if t.destination == destination], 0)
                if mine is not None:
                    try:
                        slot = mine.slot(number) if alive else torch.empty_like(mine.slots[0])
                    except RuntimeError:  # the worker is gone; the other ranks still send, so somebody has to receive
                        alive, slot = False, torch.empty_like(mine.slots[0])
                    slots[destination] = slot
                at = 0
                for source, some in by_source.items():
                    size = transport.nbytes(some)
                    if mine is not None:
                        part = slots[destination][at : at + size]
                        if source == rank:
                            transport.pack(some, self.model.tensors, replica.metas, part)
                        else:
                            operations.append(dist.P2POp(dist.irecv, part, source))
                    elif source == rank:
                        buffer = torch.empty(size, dtype=torch.uint8, device=device.current())
                        transport.pack(some, self.model.tensors, replica.metas, buffer)
                        operations.append(dist.P2POp(dist.isend, buffer, door_of[destination]))
                    at += size
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
            alive = alive and self._announce(replica.doors)
        if alive:
            try:
                for door in replica.doors.values():
                    door.end(len(replica.plan.rounds))
            except RuntimeError:
                alive = False
        if not alive:
            for door in replica.doors.values():
                door.abandon()
            replica.link.abort()
        return alive

    @staticmethod
    def _announce(doors: dict[int, SharedWriter]) -> bool:
        try:
            for door in doors.values():
                door.full()
        except RuntimeError:
            return False
        return True

    def _send_whole(self) -> list[_Replica]:
        """The `gathered` mode: buckets of whole tensors, put together on rank 0, to every engine."""
        broken: list[_Replica] = []
        for _, flat in gather(self.model, buckets(self.model.metas, self.bucket_bytes)):
            for replica in self.replicas:
                if flat is None or replica in broken:
                    continue
                try:
                    replica.link.broadcast(flat.to(replica.link.device))
                except RuntimeError:
                    replica.link.abort()
                    broken.append(replica)
        return broken

    def _audit(self, broken: list[_Replica]) -> str:
        """Compare both sides' sums; returns, on rank 0, what is wrong."""
        complaints: list[str] = []
        vectors: dict[int, torch.Tensor] = {}
        for replica in self.replicas:
            if id(replica.ledger) not in vectors:
                before = device.now()
                vector = replica.ledger.sums(self.layout.rank, self.model.tensors, replica.metas)
                self._own_audit_seconds += device.now() - before
                vector = vector.to(device.current())
                dist.all_reduce(vector)
                vectors[id(replica.ledger)] = vector.cpu()
            if self.layout.rank or replica in broken:
                continue
            try:
                complaints += self._compare(replica, vectors[id(replica.ledger)])
            except RuntimeError:  # a dead peer; its fellow workers are not to wait for a verdict
                replica.link.abort()
                broken.append(replica)
        return "\n".join(complaints)

    def _compare(self, replica: _Replica, expected: torch.Tensor) -> list[str]:
        found = [
            replica.link.receive(len(replica.senders) + worker, (len(places) + 1,), torch.int64)
            for worker, places in enumerate(replica.places)
        ]
        lines = []
        for worker, (answer, places) in enumerate(zip(found, replica.places, strict=True)):
            sums, microseconds = answer[:-1], int(answer[-1])
            self._engine_audit_seconds = max(self._engine_audit_seconds, microseconds / 1e6)
            lines += [
                f"engine {replica.index} worker {worker}: {line}"
                for line in replica.ledger.differences(expected, sums, places)
            ]
        verdict = torch.tensor([int(not lines)])
        for worker in range(replica.workers):
            replica.link.send(len(replica.senders) + worker, verdict)
        return lines

    def _conclude(self, version: int, pending, broken: list[_Replica], complaint: str) -> None:
        """Every rank returns, or every rank raises; rank 0 with the reason."""
        failed = torch.tensor([int(bool(broken or complaint))], device=device.current())
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if complaint:
            lines = complaint.splitlines()
            more = f"\n  ... and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
            good = "none" if self.last_good_version is None else self.last_good_version
            raise MegarlError(
                f"the audit of weight version {version} found {len(lines)} boxes that differ between trainer and "
                f"engine; last good version: {good}. No completion was sampled from it.\n  "
                + "\n  ".join(lines[:_NAMED])
                + more
            )
        if pending is not None:
            pending.result()
        if failed.item():
            raise MegarlError(f"the sync of weight version {version} broke off; rank 0 says why")

    def _egress(self) -> int:
        if self.config.mode == "gathered":  # once to rank 0, from there to every engine
            broadcast = sum(meta.nbytes for meta in self.model.metas) * len(self.replicas)
            return sum(self.replicas[0].plan.egress().values()) + broadcast
        fed = [replica.plan for replica in self.replicas if replica.upstream != "engine"]
        return sum(sum(plan.egress().values()) for plan in fed)
