"""A language model on Megatron that can be scored and trained: the actor; without an optimizer, the reference."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn.functional import pad

from megarl.config.model import FusedLinearLoss, ModelConfig, OptimConfig
from megarl.errors import MegarlError
from megarl.ops import self_test
from megarl.ops.linear_logprob import linear_logprob, linear_loss
from megarl.ops.logprob import greedy_match, logprob_and_entropy
from megarl.ops.logprob_kl import logprob_entropy_and_kl
from megarl.parallel.layout import Layout
from megarl.training.megatron_model import MegatronModel, onto_tokens, weighted
from megarl.types import Batch

# (logprobs [N], entropy [N], micro-batch, and where a reference is given full_kl [N]) -> (loss [N], metrics, each [N])
TokenLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]

Metrics = dict[str, torch.Tensor]


def next_tokens(batch: Batch) -> torch.Tensor:
    """[N] the token that each position predicts; the last of a sequence predicts nothing (its own id stands)."""
    targets = torch.roll(batch.tokens, -1)
    last = batch.cu_seqlens[1:].long() - 1
    targets[last] = batch.tokens[last]
    return targets


class Policy(MegatronModel):
    """One language model on all ranks. Every method is collective; a batch is the rank's own share, on the CPU.

    Fused, the model ends with its last hidden states and ops/linear_logprob.py does the rest: logits exist for a chunk
    of tokens at a time, and of written tokens only. Otherwise its output layer makes the logits of all tokens at once.
    The numbers are the same but for rounding.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        temperature: float = 1.0,
        optim: OptimConfig | None = None,
        optimizer_steps: int = 0,
        fused_linear_loss: FusedLinearLoss = "auto",
    ):
        """Load a checkpoint onto the ranks; arguments and errors as for MegatronModel.

        temperature: of sampling; log-probs, entropies and KL are those of the tempered distribution.
        fused_linear_loss: see config/actor.py.
        """
        super().__init__(model, layout, optim, optimizer_steps)
        self.temperature = temperature
        self.fused = fused_linear_loss != "off"
        self._kernels_or_nothing = fused_linear_loss == "on"

    def self_test(self, with_kl: bool = False) -> self_test.Report:
        """Compare the ops of this run with fp64 at its own sizes (ops/self_test.py); kernels that fail are given up.

        with_kl: the run needs the exact KL.

        Raises:
            MegarlError: kernels were given up although fused_linear_loss is "on", or torch itself is wrong.
        """
        weight = self.output_weight
        report = self_test.check(
            weight.shape[1],
            self.hf.vocab_size,
            len(weight),
            weight.dtype,
            self.layout.groups.tp,
            self.temperature,
            weight.device,
            with_kl,
            self.fused,
        )
        if report.given_up and self._kernels_or_nothing:
            raise MegarlError(
                f"fused_linear_loss=on, but {report.given_up}. With fused_linear_loss=auto the run goes on with torch "
                "operations"
            )
        return report

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer [V_padded / tp, H]; tied to the embedding or not."""
        model = self.unwrapped
        return model.shared_embedding_or_output_weight() if self.hf.tie_word_embeddings else model.output_layer.weight

    def statistics(
        self, batch: Batch, max_tokens: int, reference: "Policy | None" = None, temperature: float | None = None
    ) -> dict[str, torch.Tensor]:
        """ "logprobs" and "entropy" [N] fp32 of every token that loss_mask marks, 0 elsewhere.

        Args:
            batch: this rank's share; at least one sequence.
            max_tokens: tokens per micro-batch; changes memory and speed only.
            reference: asks for "full_kl" [N] as well: KL(policy || reference) over the whole vocabulary of the
                distribution that the token was drawn from. batch.ref_hidden has the reference's hidden states.
            temperature: another than the policy's own.
        """
        heat = self.temperature if temperature is None else temperature
        with self._head():
            return self._map(batch, max_tokens, lambda output, micro: self._statistics(output, micro, heat, reference))

    def logprobs(
        self, batch: Batch, max_tokens: int, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probs and entropies of `statistics`."""
        found = self.statistics(batch, max_tokens, temperature=temperature)
        return found["logprobs"], found["entropy"]

    def logprobs_and_hidden(self, batch: Batch, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probs of `statistics`, and the last hidden states [N, H] of every position."""

        def on_output(hidden, micro):
            gathered = hidden
            if self.layout.sequence_parallel:
                gathered = gather_from_sequence_parallel_region(hidden, group=self.layout.groups.tp)
            gathered = gathered[: len(micro.tokens)]
            output = hidden if self.fused else gathered @ self.output_weight.T
            return {"logprobs": self._statistics(output, micro, self.temperature)["logprobs"], "hidden": gathered}

        with self._without_output_layer():
            found = self._map(batch, max_tokens, on_output)
        return found["logprobs"], found["hidden"]

    def greedy_matches(self, batch: Batch, max_tokens: int) -> torch.Tensor:
        """[N] fp32: 1 where greedy decoding after the tokens before would give this very token; 0 where masked."""

        def on_output(logits, micro):
            match = greedy_match(logits, next_tokens(micro), self.layout.groups.tp, self.hf.vocab_size)
            return {"match": onto_tokens(match.float(), micro)}

        return self._map(batch, max_tokens, on_output)["match"]

    def gradients(
        self,
        batch: Batch,
        token_loss: TokenLoss,
        max_tokens: int,
        reference: "Policy | None" = None,
        whole_groups: bool = False,
        per_token: bool = False,
    ) -> dict[str, float]:
        """Forward and backward of one mini-batch: afterwards main_grad holds d(sum of token_weights * loss), reduced.

        Args:
            batch: this rank's share of the mini-batch with `token_weights` filled, or a placeholder.
            token_loss: (logprobs [N], entropy [N], micro-batch) -> (loss [N], metrics by name, each [N]).
            max_tokens: tokens per micro-batch; changes memory and speed only.
            reference: token_loss then takes the exact KL [N] to it as well; batch.ref_hidden is filled.
            whole_groups: keep the sequences of a group in one micro-batch.
            per_token: a token's loss depends on no other token's log-prob, entropy or KL. Fused, it is then taken
                chunk by chunk in the forward (three matrix products of the head's size instead of four).

        Returns:
            "loss", the weighted sum over all ranks; each metric's mean over the mini-batch's loss_mask tokens; and
            "tokens", how many those are.
        """

        def after_the_forward(output, micro):
            logprobs, entropy, *exact = self._statistics(output, micro, self.temperature, reference).values()
            loss, metrics = token_loss(logprobs, entropy, micro, *exact)
            return weighted(loss, micro), metrics

        def in_the_forward(hidden, micro):
            return self._loss_in_the_forward(hidden, micro, token_loss, reference)

        output_loss = in_the_forward if self.fused and per_token else after_the_forward
        with self._head():
            return self._gradients(batch, output_loss, max_tokens, whole_groups)

    def update(self, *arguments, **keywords) -> dict[str, float]:
        """One optimizer step on a mini-batch: `gradients` of these arguments, clip, Adam, schedule.

        Returns:
            what `gradients` returns, and "grad_norm" (before clipping) and "lr".

        Raises:
            MegarlError: the gradient is not finite; the weights are then not to be trusted.
        """
        return self._step(self.gradients(*arguments, **keywords))

    def _head(self) -> AbstractContextManager[None]:
        return self._without_output_layer() if self.fused else nullcontext()

    @contextmanager
    def _without_output_layer(self) -> Iterator[None]:
        """The model's output is its last hidden states [N, H]; under sequence parallelism this rank's N / tp of them.

        The output layer stays a module that is called: DistributedDataParallel's hooks hang on it.
        """
        layer = self.unwrapped.output_layer
        layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)
        try:
            yield
        finally:
            del layer.forward

    def _statistics(
        self, output: torch.Tensor, micro: Batch, temperature: float, reference: "Policy | None" = None
    ) -> dict[str, torch.Tensor]:
        """ "logprobs", "entropy" and with a reference "full_kl", [N]: of logits or, fused, of hidden states."""
        group, vocab_size = self.layout.groups.tp, self.hf.vocab_size
        if self.fused:
            targets = self._written_targets(output, micro)
            options = self._head_options(len(targets), micro, temperature, reference)
            values = linear_logprob(output, self.output_weight, targets, **options)
        else:
            inputs = (output,) if reference is None else (output, (micro.ref_hidden, reference.output_weight))
            op = logprob_and_entropy if reference is None else logprob_entropy_and_kl
            # Nobody reads a micro-batch's logits after their gradient: it may lie over them.
            values = op(*inputs, next_tokens(micro), group, temperature, vocab_size, inplace_backward=True)
        return _by_name(values, micro)

    def _loss_in_the_forward(
        self, hidden: torch.Tensor, micro: Batch, token_loss: TokenLoss, reference: "Policy | None"
    ) -> tuple[torch.Tensor, Metrics]:
        """(weighted loss, metrics) of a loss per token; the output layer's gradients exist when this returns."""
        targets = self._written_targets(hidden, micro)
        num_tokens = len(micro.tokens)

        def chunk_loss(logprobs, entropy, places, *exact):
            # The algorithm sees the whole micro-batch, but only the chunk's tokens are filled in and counted.
            tokens = places + 1
            filled = [v.new_zeros(num_tokens).index_copy(0, tokens, v) for v in (logprobs, entropy, *exact)]
            loss, _ = token_loss(*filled[:2], micro, *filled[2:])
            return (micro.token_weights * loss)[tokens]

        options = self._head_options(len(targets), micro, self.temperature, reference)
        loss, *values = linear_loss(hidden, self.output_weight, targets, chunk_loss, **options)
        with torch.no_grad():
            logprobs, entropy, *exact = _by_name(values, micro).values()
            _, metrics = token_loss(logprobs, entropy, micro, *exact)
        return loss, metrics

    def _written_targets(self, hidden: torch.Tensor, micro: Batch) -> torch.Tensor:
        """[N_padded] int64: the token after each position where the policy wrote it, -100 where it did not."""
        num_positions = len(hidden) * (self.layout.tp_size if self.layout.sequence_parallel else 1)
        targets = torch.where(micro.loss_mask.roll(-1) > 0, micro.tokens.roll(-1), -100)
        targets[-1] = -100
        return pad(targets, (0, num_positions - len(targets)), value=-100)

    def _head_options(
        self, num_positions: int, micro: Batch, temperature: float, reference: "Policy | None"
    ) -> dict[str, Any]:
        options = dict(
            group=self.layout.groups.tp,
            temperature=temperature,
            vocab_size=self.hf.vocab_size,
            sequence_parallel=self.layout.sequence_parallel,
        )
        if reference is not None:
            missing = num_positions - len(micro.ref_hidden)
            options["reference"] = (pad(micro.ref_hidden, (0, 0, 0, missing)), reference.output_weight)
        return options


def _by_name(values, micro: Batch) -> dict[str, torch.Tensor]:
    """Per position [N or more] -> {name: per token [N]}."""
    names = ("logprobs", "entropy", "full_kl")
    return {name: onto_tokens(value[: len(micro.tokens)], micro) for name, value in zip(names, values, strict=False)}
