"""A language model on Megatron that can be scored and trained: the actor; without an optimizer, the reference."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from megarl.config.model import ModelConfig, OptimConfig
from megarl.data import batch as batches
from megarl.data.packing import pack
from megarl.errors import MegarlError
from megarl.models import build, hf_files
from megarl.ops.logprob import greedy_match, logprob_and_entropy
from megarl.parallel import device
from megarl.parallel.collectives import sum_over
from megarl.parallel.layout import Layout
from megarl.resharding import files
from megarl.training import optimizer as optimizers
from megarl.training import schedule
from megarl.types import Batch

TokenLoss = Callable[[torch.Tensor, torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def next_tokens(batch: Batch) -> torch.Tensor:
    """[N] the token that each position predicts; the last of a sequence predicts nothing (its own id stands)."""
    targets = torch.roll(batch.tokens, -1)
    last = batch.cu_seqlens[1:].long() - 1
    targets[last] = batch.tokens[last]
    return targets


def onto_tokens(predicted: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Move a per-position quantity [N] onto the token it predicts; zero where `loss_mask` is 0 (first tokens too)."""
    moved = torch.nn.functional.pad(predicted[:-1], (1, 0))
    return torch.where(batch.loss_mask.bool(), moved, torch.zeros_like(moved))


class Policy:
    """One model on all ranks. Every method is collective over them; a batch is the rank's own share, on the CPU."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        temperature: float = 1.0,
        optim: OptimConfig | None = None,
        optimizer_steps: int = 0,
    ):
        """Load a checkpoint onto the ranks.

        Args:
            model: path and types.
            layout: this rank's place.
            temperature: the sampling temperature; log-probs and entropies are those of the tempered distribution.
            optim: makes the policy trainable; None freezes it.
            optimizer_steps: of the whole run, the horizon of the learning-rate schedule.

        Raises:
            ValueError: the checkpoint cannot be read or does not fit the layout.
        """
        self.layout = layout
        self.temperature = temperature
        self.hf = hf_files.load_config(model.path)
        self.source = model.path
        module = build.build(self.hf, model, layout)
        self.sharded = files.load(module, model.path, layout)
        self.sum_over_dp = sum_over(layout.groups.dp)
        self.module = module
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

    def _statistics(
        self, logits: torch.Tensor, micro: Batch, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heat = self.temperature if temperature is None else temperature
        logprobs, entropy = logprob_and_entropy(
            logits, next_tokens(micro), self.layout.groups.tp, heat, self.hf.vocab_size
        )
        return onto_tokens(logprobs, micro), onto_tokens(entropy, micro)

    def _micro_batches(self, batch: Batch, max_tokens: int) -> tuple[list[torch.Tensor], list[Batch]]:
        rows = [torch.tensor(r) for r in pack(batch.lengths.tolist(), max_tokens)]
        return rows, [batches.to(batches.select(batch, r), device.current()) for r in rows]

    @torch.no_grad()
    def _map(self, batch: Batch, max_tokens: int, names: list[str], on_logits) -> dict[str, torch.Tensor]:
        """Forward over micro-batches; per-token results [N] by name, on the CPU, in the batch's own order."""
        rows, micro_batches = self._micro_batches(batch, max_tokens)
        self.module.eval()
        kept = schedule.run(self.module, micro_batches, on_logits, self.layout, forward_only=True)
        results = {name: torch.zeros(len(batch.tokens)) for name in names}
        for r, outputs in zip(rows, kept, strict=True):
            at = batches.token_rows(batch, r)
            for name in names:
                results[name][at] = outputs[name].float().cpu()
        return results

    def logprobs(
        self, batch: Batch, max_tokens: int, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy [N] fp32 of every token that loss_mask marks; 0 elsewhere.

        Args:
            batch: this rank's share; at least one sequence.
            max_tokens: tokens per micro-batch; changes memory and speed only.
            temperature: another than the policy's own.
        """

        def on_logits(logits, micro):
            logprobs, entropy = self._statistics(logits, micro, temperature)
            return logits.new_zeros(()), {"logprobs": logprobs, "entropy": entropy}

        found = self._map(batch, max_tokens, ["logprobs", "entropy"], on_logits)
        return found["logprobs"], found["entropy"]

    def greedy_matches(self, batch: Batch, max_tokens: int) -> torch.Tensor:
        """[N] fp32: 1 where greedy decoding after the tokens before would give this very token; 0 where masked."""

        def on_logits(logits, micro):
            match = greedy_match(logits, next_tokens(micro), self.layout.groups.tp, self.hf.vocab_size)
            return logits.new_zeros(()), {"match": onto_tokens(match.float(), micro)}

        return self._map(batch, max_tokens, ["match"], on_logits)["match"]

    @torch.no_grad()
    def export(self, folder: Path, on_progress: Callable[[str], None]) -> None:
        """Write the present weights, config.json and tokenizer as a Hugging Face checkpoint. See `files.export`."""
        files.export(self.sharded, self.source, folder, on_progress)

    def gradients(self, batch: Batch | None, token_loss: TokenLoss, max_tokens: int) -> dict[str, float]:
        """Forward and backward of one mini-batch: afterwards main_grad holds d(sum of token_weights * loss), reduced.

        Args:
            batch: this rank's share of the mini-batch with `token_weights` filled, or a placeholder.
            token_loss: (logprobs [N], entropy [N], micro-batch) -> (loss [N], metrics by name, each [N]).
            max_tokens: tokens per micro-batch; changes memory and speed only.

        Returns:
            "loss", the weighted sum over all ranks, and each metric's mean over the mini-batch's loss_mask tokens.
        """

        def on_logits(logits, micro):
            logprobs, entropy = self._statistics(logits, micro)
            loss, metrics = token_loss(logprobs, entropy, micro)
            weighted = (micro.token_weights * loss).sum()
            sums = {name: (value.detach() * micro.loss_mask).sum() for name, value in metrics.items()}
            return weighted, sums | {"loss": weighted.detach(), "tokens": micro.loss_mask.sum()}

        _, micro_batches = self._micro_batches(batch, max_tokens)
        self.module.train()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = schedule.run(self.module, micro_batches, on_logits, self.layout, forward_only=False)
        names = sorted(kept[0])
        local = torch.stack([sum(outputs[name].double() for outputs in kept) for name in names])
        sums = dict(zip(names, self.sum_over_dp(local).tolist(), strict=True))
        loss, tokens = sums.pop("loss"), sums.pop("tokens")
        return {"loss": loss} | {name: total / max(tokens, 1.0) for name, total in sums.items()}

    def update(self, batch: Batch, token_loss: TokenLoss, max_tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch: `gradients`, clip, Adam, schedule.

        Returns:
            what `gradients` returns, and "grad_norm" (before clipping) and "lr".

        Raises:
            MegarlError: the gradient is not finite; the weights are then not to be trusted.
        """
        metrics = self.gradients(batch, token_loss, max_tokens)
        self.scheduler.step(increment=1)  # before the step: the first update then has 1/warm-up of the rate, not 0
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise MegarlError(
                f"the gradient norm is {grad_norm}; loss {metrics['loss']}. Lower the learning rate or raise the "
                "precision (actor.model.dtype=float32) and start again from the last checkpoint"
            )
        return metrics | {"grad_norm": grad_norm, "lr": self.optimizer.param_groups[0]["lr"]}
