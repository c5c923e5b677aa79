"""Runs inside vLLM's workers: receives new weights, installs them, and says what it now holds.

Registered by the entry point `vllm.general_plugins`, which every vLLM process loads. Nothing of Megatron may come along
(a test looks at `sys.modules`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "megarl"}'` known. Called by vLLM in each of its processes.

    Raises:
        MegarlError: this vLLM is not one whose reload the plugin knows.
    """
    from megarl.versions import check_vllm

    check_vllm()
    from vllm import __version__ as vllm_version
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

    from megarl.resharding import handshake, transport, vllm_reload
    from megarl.resharding.audit import checksum
    from megarl.resharding.pieces import TensorMeta, buckets, unpack
    from megarl.resharding.shared_memory import SharedReader
    from megarl.resharding.vllm_layout import EngineLayout

    vllm_reload.mend_moe_prepack()

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        host: str
        port: int
        replica: int
        mode: str  # "planned" | "gathered"
        tensors: list  # [[name, shape, dtype], ...] in the order they travel
        bucket_bytes: int

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        version: int
        digest: str  # of the plan that the trainer follows
        audited: bool

    class MegarlEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        """One update: layers back to their raw form, boxes into place, sums to the trainer, its verdict."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        guard: vllm_reload.HalfInstalled | None = None
        link = upstream = downstream = shared = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.shutdown()  # of a bridge before this one
            self.guard = self.guard or vllm_reload.HalfInstalled(self.model)
            self.mode = init_info.mode
            self.bucket_bytes = init_info.bucket_bytes
            self.metas = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in init_info.tensors]
            parallel = self.parallel_config
            worker = parallel.data_parallel_rank * parallel.world_size + parallel.rank
            self.store = transport.visit(init_info.host, init_info.port)
            self.layout, error = EngineLayout(), ""
            if self.mode == "planned":
                try:
                    with vllm_reload.on_device(self.device):
                        self.layout = vllm_reload.traced_layout(self.model, self.metas)
                except Exception as failure:  # the trainer hears of it from here: vLLM asks its workers in turn
                    error = f"{type(failure).__name__}: {failure}"
            self.program = self._agree(init_info.replica, worker, error)
            self._connect(init_info.replica, worker)

        def _agree(self, replica: int, worker: int, error: str) -> handshake.Program:
            """Say what this worker holds; learn what comes."""
            digest = handshake.digest_of(self.layout)
            if self.store.add(f"claim/{digest}", 1) == 1:  # the first of its kind: the layout travels once
                self.store.set(f"layout/{digest}", msgspec.json.encode(self.layout))
            device = transport.identity(self.device)
            hello = handshake.Hello(vllm_version, digest, socket.gethostname(), device, error)
            self.store.set(f"hello/{replica}/{worker}", msgspec.json.encode(hello))
            program = msgspec.json.decode(self.store.get(f"program/{replica}/{worker}"), type=handshake.Program)
            if program.error:
                raise ValueError(program.error)
            return program

        def _connect(self, replica: int, worker: int) -> None:
            program = self.program
            self.store.set(f"joining/{replica}/{worker}", b"")
            self.link = transport.Link(
                self.store, f"engine/{replica}", program.member, program.members, program.backend
            )
            chain = lambda lower, place: transport.Link(  # noqa: E731
                self.store, f"chain/{lower}", place, 2 * program.workers, program.backend
            )
            # Upstream first on every replica: the communicators of a chain then form one after the other.
            self.upstream = chain(replica - 1, program.workers + worker) if program.upstream == "engine" else None
            self.downstream = chain(replica, worker) if program.has_downstream else None
            self.downstream_peer = program.workers + worker
            self.upstream_peer = worker
            self.shared = SharedReader(program.memory, self.link, self.device) if program.memory else None

        def start_weight_update(self) -> None:
            pass  # `receive_weights` does all, so that an update that breaks off has one place to be noticed

        def update_weights(self, update_info) -> None:
            # The base class synchronises an accelerator here, which a CPU worker does not have.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if self.link is None:
                raise ValueError("the last update broke off, and its communicator with it; connect the bridge again")
            try:
                if update_info.digest != self.program.digest:
                    raise ValueError(
                        f"the trainer follows plan {update_info.digest}, this worker was given {self.program.digest}"
                    )
                self.guard.begin(update_info.version)
                with vllm_reload.on_device(self.device):
                    sums = self._install(update_info.audited)
                if update_info.audited:
                    self._await_verdict(sums)
            except BaseException:
                self.shutdown()  # whoever still sends or waits for this worker is to fail now, not at its time-out
                raise
            self.guard.end()

        def _install(self, audited: bool) -> torch.Tensor | None:
            if self.mode == "gathered":
                return self._install_whole(audited)
            installation = vllm_reload.Installation(self.model, self.layout, audited)
            staged = {
                handshake.STAGING + meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
                for meta in self.program.whole
            }
            for takes, buffer in self._buffers():
                names = [take.tensor for take in takes]
                dtypes = [
                    staged[name].dtype if name in staged else getattr(torch, self.layout.dtypes[name]) for name in names
                ]
                values = None
                for take, values in zip(
                    takes, transport.unpack([take.sizes for take in takes], dtypes, buffer), strict=True
                ):
                    if take.tensor in staged:
                        take.view(staged[take.tensor]).copy_(values)
                    else:
                        installation.write(take, values)
                del buffer, values
            sums, self.audit_seconds = installation.sums, installation.audit_seconds
            if staged:
                if audited:
                    extra = [_whole_sum(tensor) for tensor in staged.values()]
                    sums = torch.cat([sums, torch.stack(extra).cpu()])
                installation.load_whole({name.removeprefix(handshake.STAGING): t for name, t in staged.items()})
            installation.finish(self.model_config)
            return sums

        def _install_whole(self, audited: bool) -> torch.Tensor | None:
            """The `gathered` mode: whole tensors, through vLLM's own loader."""
            sums, self.audit_seconds = [], 0.0

            def arriving() -> Iterator[tuple[str, torch.Tensor]]:
                for bucket in buckets(self.metas, self.bucket_bytes):
                    size = sum(meta.nbytes for meta in bucket)
                    flat = torch.empty(size, dtype=torch.uint8, device=self.link.device)
                    self.link.broadcast(flat)
                    tensors = unpack(bucket, flat.to(self.device))
                    if audited:
                        before = time.perf_counter()
                        sums.extend(_whole_sum(tensor).cpu() for tensor in tensors.values())
                        self.audit_seconds += time.perf_counter() - before
                    yield from tensors.items()

            vllm_reload.load_all(self.model, arriving(), self.model_config)
            return torch.stack(sums) if audited else None

        def _buffers(self) -> Iterator[tuple[list, torch.Tensor]]:
            """(takes, buffer) of each round; the next buffer is on its way while one is being installed."""
            last = len(self.program.rounds) - 1
            following = self._post(0) if last >= 0 else None
            for number in range(last + 1):
                takes, buffer, wait = following
                following = self._post(number + 1) if number < last else None
                wait()
                del wait  # it holds the buffer too, and two buffers are the limit
                sent = None
                if self.downstream is not None:
                    sent = self.downstream.exchange(sends=[(self.downstream_peer, buffer)])
                yield takes, buffer if buffer.device == self.device else buffer.to(self.device)
                if sent is not None:
                    sent()
                del buffer, sent

        def _post(self, number: int):
            step = self.program.rounds[number]
            size = sum(count for _, count in step.parts)
            if self.shared is not None:
                return step.takes, *self.shared.post(number, size)
            link = self.upstream or self.link
            buffer = torch.empty(size, dtype=torch.uint8, device=link.device)
            if self.upstream is not None:
                return step.takes, buffer, link.exchange(receives=[(self.upstream_peer, buffer)] if size else [])
            parts = buffer.split([count for _, count in step.parts]) if step.parts else []
            peers = [peer for peer, _ in step.parts]
            return step.takes, buffer, link.exchange(receives=list(zip(peers, parts)))

        def _await_verdict(self, sums: torch.Tensor) -> None:
            microseconds = torch.tensor([int(1e6 * self.audit_seconds)])
            self.link.send(0, torch.cat([sums, microseconds]))
            if not int(self.link.receive(0, (1,), torch.int64)):
                raise ValueError("the audit found other weights than the trainer sent; its error names the tensors")

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            for link in (self.link, self.upstream, self.downstream):
                if link is not None:
                    link.abort()
            self.link = self.upstream = self.downstream = self.shared = None

    def _whole_sum(tensor: torch.Tensor) -> torch.Tensor:
        return checksum(tensor, tuple((0, n) for n in tensor.shape), tensor.dtype)

    WeightTransferEngineFactory.register_engine("megarl", MegarlEngine)
