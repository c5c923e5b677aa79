"""What a vLLM worker holds, computed from its coordinates instead of traced: for engines too large to be built here.

It mirrors what `resharding/vllm_layout.py` reads off vLLM's loader (a test compares the two, piece by piece, on small
models): query, key and value fused, with KV heads repeated where there are more workers than heads; gate and up fused;
experts stacked, cut by tensor or dealt out by expert parallelism; vocabularies padded to 64 rows; DeepSeek's two down
projections fused and whole on every worker.
"""

from dataclasses import dataclass

from resharding_models import Model

from megarl.models.weights import Copy, Entry, Experts, FusedQKV, GateUp, Vocabulary
from megarl.resharding.pieces import Box, Piece

_VOCABULARY_PADDING = 64
_FUSED_DOWN = {"q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj"}


@dataclass(frozen=True)
class EngineSizes:
    """One vLLM engine of tp * pp workers, worker pp_rank * tp + tp_rank."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False  # the experts of a stage are dealt out to its tp workers instead of cut

    @property
    def workers(self) -> int:
        return self.tp * self.pp


def stage_layers(num_layers: int, pp_rank: int, pp: int) -> range:
    """The layers of one stage, as vLLM's `get_pp_indices` shares them out: what is left over goes to the stages before
    the last, one each.
    """
    counts = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        counts[-i] += 1
    start = sum(counts[:pp_rank])
    return range(start, start + counts[pp_rank])


def worker_pieces(model: Model, engine: EngineSizes, worker: int) -> list[Piece]:
    """All pieces of one worker, in model order."""
    pp_rank, tp_rank = divmod(worker, engine.tp)
    write = _Worker(model, engine, tp_rank)
    is_first, is_last = pp_rank == 0, pp_rank == engine.pp - 1
    # With a tied head the last stage keeps an embedding of its own.
    embeds = is_first or (is_last and model.config.tie_word_embeddings)
    for entry in model.table.first if embeds else ():
        write.entry(entry, "")
    for i in stage_layers(len(model.table.layers), pp_rank, engine.pp):
        for entry in model.table.layers[i]:
            write.entry(entry, str(i))
    for entry in model.table.last if is_last else ():
        write.entry(entry, "")
    return write.pieces


class _Worker:
    def __init__(self, model: Model, engine: EngineSizes, tp_rank: int):
        self.model, self.engine, self.tp_rank, self.tp = model, engine, tp_rank, engine.tp
        self.pieces: list[Piece] = []

    def entry(self, entry: Entry, layer: str) -> None:
        shapes = self.model.shapes
        match entry:
            case Vocabulary():
                rows = shapes[entry.hf][0]
                padded = -(-rows // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
                share = padded // self.tp
                first, last = min(self.tp_rank * share, rows), min((self.tp_rank + 1) * share, rows)
                if last > first:
                    self._rows(entry.hf, entry.hf, first, last, 0)
            case FusedQKV():
                self._qkv(entry, layer)
            case GateUp():
                name = entry.gate.replace("{i}", layer)
                fused = name.replace("gate_proj", "gate_up_proj")
                share = shapes[name][0] // self.tp
                first = self.tp_rank * share
                self._rows(name, fused, first, first + share, 0)
                self._rows(entry.up.replace("{i}", layer), fused, first, first + share, share)
            case Copy():
                self._copy(entry, entry.hf.replace("{i}", layer))
            case Experts():
                self._experts(entry, layer)

    def _rows(self, name: str, tensor: str, first: int, last: int, at: int) -> None:
        """Rows [first, last) of a checkpoint tensor, whole rows, at row `at` of the parameter."""
        tail = self.model.shapes[name][1:]
        width = tail[0] if tail else 1
        box: Box = ((first, last), *((0, n) for n in tail))
        self.pieces.append(Piece(name, box, tensor, at * width, (width, 1) if tail else (1,)))

    def _qkv(self, entry: FusedQKV, layer: str) -> None:
        table = self.model.table
        heads = table.num_query_groups * table.heads_per_group // self.tp
        kv_heads = max(1, table.num_query_groups // self.tp)
        kv_rank = self.tp_rank // max(1, self.tp // table.num_query_groups)
        tensor = entry.q.replace("{i}", layer).replace("q_proj", "qkv_proj")
        at = 0
        for name, count, rank in (
            (entry.q, heads, self.tp_rank),
            (entry.k, kv_heads, kv_rank),
            (entry.v, kv_heads, kv_rank),
        ):
            rows = count * table.head_dim
            self._rows(name.replace("{i}", layer), tensor, rank * rows, (rank + 1) * rows, at)
            at += rows

    def _copy(self, entry: Copy, name: str) -> None:
        shape = self.model.shapes[name]
        module = name.split(".")[-2]
        if module in _FUSED_DOWN:
            at = 0 if module == "q_a_proj" else self.model.config.q_lora_rank
            self._rows(name, name.replace(module, _FUSED_DOWN[module]), 0, shape[0], at)
        elif entry.split is None:
            self._rows(name, name, 0, shape[0], 0)
        elif entry.split == 0:
            share = shape[0] // self.tp
            self._rows(name, name, self.tp_rank * share, (self.tp_rank + 1) * share, 0)
        else:
            share = shape[1] // self.tp
            first = self.tp_rank * share
            self.pieces.append(Piece(name, ((0, shape[0]), (first, first + share)), name, 0, (share, 1)))

    def _experts(self, entry: Experts, layer: str) -> None:
        num_experts = self.model.table.num_experts
        if self.engine.expert_parallel:
            # `determine_expert_map`: runs of equal length, the first ones longer by one where it does not divide.
            base, rest = divmod(num_experts, self.tp)
            first = self.tp_rank * base + min(self.tp_rank, rest)
            experts, part, parts = range(first, first + base + (self.tp_rank < rest)), 0, 1
        else:
            experts, part, parts = range(num_experts), self.tp_rank, self.tp
        names = (entry.each.gate, entry.each.up) if isinstance(entry.each, GateUp) else (entry.each.hf,)
        heads_and_tails = [name.replace("{i}", layer).split("{e}") for name in names]
        head = heads_and_tails[0][0]
        rows, columns = self.model.shapes[f"{head}0{heads_and_tails[0][1]}"]
        if isinstance(entry.each, GateUp):
            tensor, share = f"{head}routed_experts.w13_weight", rows // parts
            box: Box = ((part * share, (part + 1) * share), (0, columns))
            each, offsets, strides = 2 * share * columns, (0, share * columns), (columns, 1)
        else:
            tensor, share = f"{head}routed_experts.w2_weight", columns // parts
            box = ((0, rows), (part * share, (part + 1) * share))
            each, offsets, strides = rows * share, (0,), (share, 1)
        for (start, end), offset in zip(heads_and_tails, offsets, strict=True):
            self.pieces += [
                Piece(f"{start}{e}{end}", box, tensor, local * each + offset, strides)
                for local, e in enumerate(experts)
            ]
