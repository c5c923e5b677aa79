"""Which rank stands where in a parallel layout, and which layers it holds. Plain arithmetic: no process group is asked.

Megatron-core numbers its ranks in the order "tp-cp-ep-dp-pp": the first varies fastest. Experts have their own
arrangement of the same ranks, with expert-tensor parallelism in the place of tensor parallelism.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank: in the dense layers (tp, dp, pp) and in the experts (etp, ep, edp, pp)."""

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share what: tensor, pipeline, expert and expert-tensor parallelism; the rest are copies.

    `vpp` is the number of model chunks on each pipeline stage (1: no interleaving). `first_stage_layers` and
    `last_stage_layers` are Megatron's num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.

    Raises:
        ValueError: a size is not positive, or the world cannot be cut so.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self):
        for name in ("world_size", "tp", "pp", "vpp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} in a parallel layout must be at least 1")
        self._check_divides(self.tp * self.pp, f"tp={self.tp} x pp={self.pp}")
        self._check_divides(self.etp * self.ep * self.pp, f"etp={self.etp} x ep={self.ep} x pp={self.pp}")
        if self.pp == 1 and self.vpp > 1:
            raise ValueError(f"vpp={self.vpp} needs pipeline parallelism, but pp=1")
        if self.pp == 1 and (self.first_stage_layers, self.last_stage_layers) != (None, None):
            raise ValueError("first_stage_layers and last_stage_layers need pipeline parallelism, but pp=1")

    def _check_divides(self, ranks: int, names: str) -> None:
        if self.world_size % ranks:
            raise ValueError(f"{self.world_size} ranks cannot be cut into groups of {names}")

    @property
    def dp(self) -> int:
        """Copies of the dense layers."""
        return self.world_size // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def of(self, rank: int) -> Coordinates:
        """The place of global rank `rank`."""
        pp, within_stage = divmod(rank, self.world_size // self.pp)
        dp, tp = divmod(within_stage, self.tp)
        rest, etp = divmod(within_stage, self.etp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, edp=edp)

    def stage_layers(self, num_layers: int) -> list[int]:
        """Number of layers on each pipeline stage.

        Raises:
            ValueError: the layers cannot be shared out evenly, as Megatron asks of the stages that are given no number.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        free_stages = self.pp - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        even = left // free_stages if free_stages else 0
        middle = [even] * free_stages
        stages = [first] * (first is not None) + middle + [last] * (last is not None)
        if sum(stages) != num_layers or min(stages) < 1 or any(count % self.vpp for count in stages):
            raise ValueError(
                f"{num_layers} layers cannot be shared by pp={self.pp} stages of vpp={self.vpp} equal chunks each"
                f" (first_stage_layers={first}, last_stage_layers={last})"
            )
        return stages

    def layers(self, pp_rank: int, chunk: int, num_layers: int) -> range:
        """Global indices of the layers in chunk `chunk` of stage `pp_rank`.

        The chunks of all stages are dealt out in turns: first chunk 0 of every stage, then chunk 1 of every stage.
        """
        per_chunk = [count // self.vpp for count in self.stage_layers(num_layers)]
        start = chunk * sum(per_chunk) + sum(per_chunk[:pp_rank])
        return range(start, start + per_chunk[pp_rank])
