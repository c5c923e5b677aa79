"""A model on all ranks that runs packed batches and can be trained: what policy, critic and reward model share."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from megarl import models
from megarl.config.model import ModelConfig, OptimConfig
from megarl.data import batch as batches
from megarl.data.packing import pack
from megarl.errors import MegarlError
from megarl.models import build, heads, hf_files
from megarl.parallel import device
from megarl.parallel.collectives import sum_over
from megarl.parallel.layout import Layout
from megarl.resharding import files
from megarl.training import optimizer as optimizers
from megarl.training import schedule
from megarl.types import Batch

# (the head's output, micro-batch) -> (weighted loss, a scalar; metrics by name, each [N])
OutputLoss = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def onto_tokens(predicted: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Move a per-position quantity [N] onto the token after it, which the position speaks of; zero where `loss_mask` is
    0 (first tokens too).
    """
    moved = torch.nn.functional.pad(predicted[:-1], (1, 0))
    return torch.where(batch.loss_mask.bool(), moved, torch.zeros_like(moved))


def weighted(loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The scalar that is minimised, of losses [N]."""
    return (batch.token_weights * loss).sum()


class MegatronModel:
    """One model on all ranks. Every method is collective over them; a batch is the rank's own share, on the CPU."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        optim: OptimConfig | None = None,
        optimizer_steps: int = 0,
        value_head: bool = False,
    ):
        """Load a checkpoint onto the ranks.

        Args:
            model: path and types.
            layout: this rank's place.
            optim: makes the model trainable; None freezes it.
            optimizer_steps: of the whole run, the horizon of the learning-rate schedule.
            value_head: one number per token (models/heads.py) in the place of logits. A checkpoint without one gets
                one of zeros.

        Raises:
            ValueError: the checkpoint cannot be read or does not fit the layout.
        """
        self.layout = layout
        self.hf = hf_files.load_config(model.path)
        self.source = model.path
        module = build.build(self.hf, model, layout, value_head)
        if value_head:
            table = heads.value_table(models.get(self.hf.model_type).weight_table(self.hf))
            self.sharded = files.load(module, model.path, layout, table, {hf_files.SCORE: (1, self.hf.hidden_size)})
        else:
            self.sharded = files.load(module, model.path, layout)
        self._config_changes = heads.value_config(self.hf) if value_head else {}
        self.sum_over_dp = sum_over(layout.groups.dp)
        self.module = self.unwrapped = module
        if optim is None:
            module.requires_grad_(False)
            return
        module.config.finalize_model_grads_func = finalize_model_grads
        self.module = DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module,
            pg_collection=layout.groups,
        )
        self.optimizer, self.scheduler = optimizers.build(
            self.module, optim, module.config.params_dtype, layout, optimizer_steps
        )

    def _micro_batches(
        self, batch: Batch, max_tokens: int, whole_groups: bool = False
    ) -> tuple[list[torch.Tensor], list[Batch]]:
        """Rows and batches of each micro-batch; with `whole_groups`, sequences of one group come into the same."""
        if whole_groups:
            groups, group_of = torch.unique(batch.group_ids, return_inverse=True)
            lengths = torch.zeros(len(groups), dtype=torch.int64).index_add(0, group_of, batch.lengths)
            bins = [torch.tensor(b) for b in pack(lengths.tolist(), max_tokens)]
            rows = [torch.nonzero(torch.isin(group_of, b)).squeeze(1) for b in bins]
        else:
            rows = [torch.tensor(r) for r in pack(batch.lengths.tolist(), max_tokens)]
        return rows, [batches.to(batches.select(batch, r), device.current()) for r in rows]

    @torch.no_grad()
    def _map(
        self,
        batch: Batch,
        max_tokens: int,
        on_output: Callable[[torch.Tensor, Batch], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Forward over micro-batches; per-token results [N, ...] by name, on the CPU, in the batch's own order."""
        rows, micro_batches = self._micro_batches(batch, max_tokens)
        self.module.eval()
        kept = schedule.run(
            self.module,
            micro_batches,
            lambda output, micro: (output.new_zeros(()), on_output(output, micro)),
            self.layout,
            forward_only=True,
        )
        results: dict[str, torch.Tensor] = {}
        for name, value in kept[0].items():
            results[name] = torch.zeros(len(batch.tokens), *value.shape[1:], dtype=value.dtype)
            for r, outputs in zip(rows, kept, strict=True):
                results[name][batches.token_rows(batch, r)] = outputs[name].cpu()
        return results

    @torch.no_grad()
    def export(self, folder: Path, on_progress: Callable[[str], None]) -> None:
        """Write the present weights, config.json and tokenizer as a Hugging Face checkpoint. See `files.export`."""
        files.export(self.sharded, self.source, folder, on_progress, self._config_changes)

    def _gradients(
        self, batch: Batch, output_loss: OutputLoss, max_tokens: int, whole_groups: bool = False
    ) -> dict[str, float]:
        """Forward and backward of one mini-batch: afterwards main_grad holds d(sum of token_weights * loss), reduced.

        Args:
            batch: this rank's share of the mini-batch with `token_weights` filled, or a placeholder.
            output_loss: (the head's output, micro-batch) -> (weighted loss, a scalar; metrics by name, each [N]).
            max_tokens: tokens per micro-batch; changes memory and speed only.
            whole_groups: keep the sequences of a group in one micro-batch.

        Returns:
            "loss", the weighted sum over all ranks; each metric's mean over the mini-batch's loss_mask tokens; and
            "tokens", how many those are.
        """

        def on_output(output, micro):
            loss, metrics = output_loss(output, micro)
            sums = {name: (value.detach() * micro.loss_mask).sum() for name, value in metrics.items()}
            return loss, sums | {"loss": loss.detach(), "tokens": micro.loss_mask.sum()}

        _, micro_batches = self._micro_batches(batch, max_tokens, whole_groups)
        self.module.train()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = schedule.run(self.module, micro_batches, on_output, self.layout, forward_only=False)
        names = sorted(kept[0])
        local = torch.stack([sum(outputs[name].double() for outputs in kept) for name in names])
        sums = dict(zip(names, self.sum_over_dp(local).tolist(), strict=True))
        loss, tokens = sums.pop("loss"), sums.pop("tokens")
        means = {name: total / max(tokens, 1.0) for name, total in sums.items()}
        return means | {"loss": loss, "tokens": tokens}

    def _step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Clip, Adam and schedule after `_gradients`, whose metrics come back with "grad_norm" and "lr".

        Raises:
            MegarlError: the gradient is not finite; the weights are then not to be trusted.
        """
        self.scheduler.step(increment=1)  # before the step: the first update then has 1/warm-up of the rate, not 0
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise MegarlError(
                f"the gradient norm is {grad_norm}; loss {metrics['loss']}. Lower the learning rate or raise the "
                "precision (actor.model.dtype=float32) and start again from the last checkpoint"
            )
        return metrics | {"grad_norm": grad_norm, "lr": self.optimizer.param_groups[0]["lr"]}

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the model keeps between steps on this rank: ("weights" | "gradients" | "optimizer", tensor)."""
        for parameter in self.module.parameters():
            yield "weights", parameter
        if not isinstance(self.module, DistributedDataParallel):
            return
        for buffer in self.module.buffers + self.module.expert_parallel_buffers:
            yield "gradients", buffer.grad_data
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for parameter, state in optimizer.optimizer.state.items():
                yield "optimizer", parameter
                yield from (("optimizer", value) for value in state.values() if isinstance(value, torch.Tensor))
