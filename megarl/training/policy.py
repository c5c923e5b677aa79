"""A language model on Megatron that can be scored and trained: the actor; without an optimizer, the reference."""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megarl.config.model import ModelConfig, OptimConfig
from megarl.ops.full_kl import full_kl
from megarl.ops.logprob import greedy_match, logprob_and_entropy
from megarl.parallel.layout import Layout
from megarl.training.megatron_model import MegatronModel, onto_tokens
from megarl.types import Batch

# (logprobs [N], entropy [N], micro-batch, and where a reference is given full_kl [N]) -> (loss [N], metrics, each [N])
TokenLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def next_tokens(batch: Batch) -> torch.Tensor:
    """[N] the token that each position predicts; the last of a sequence predicts nothing (its own id stands)."""
    targets = torch.roll(batch.tokens, -1)
    last = batch.cu_seqlens[1:].long() - 1
    targets[last] = batch.tokens[last]
    return targets


class Policy(MegatronModel):
    """One language model on all ranks. Every method is collective; a batch is the rank's own share, on the CPU."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        temperature: float = 1.0,
        optim: OptimConfig | None = None,
        optimizer_steps: int = 0,
    ):
        """Load a checkpoint onto the ranks; arguments and errors as for MegatronModel.

        temperature: of sampling; log-probs, entropies and KL are those of the tempered distribution.
        """
        super().__init__(model, layout, optim, optimizer_steps)
        self.temperature = temperature

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer [V_padded / tp, H]; tied to the embedding or not."""
        model = self.unwrapped
        return model.shared_embedding_or_output_weight() if self.hf.tie_word_embeddings else model.output_layer.weight

    def _statistics(
        self,
        logits: torch.Tensor,
        micro: Batch,
        temperature: float | None = None,
        reference: "Policy | None" = None,
    ) -> dict[str, torch.Tensor]:
        heat = self.temperature if temperature is None else temperature
        group = self.layout.groups.tp
        logprobs, entropy = logprob_and_entropy(logits, next_tokens(micro), group, heat, self.hf.vocab_size)
        found = {"logprobs": onto_tokens(logprobs, micro), "entropy": onto_tokens(entropy, micro)}
        if reference is not None:
            exact = full_kl(logits, micro.ref_hidden, reference.output_weight, group, heat, self.hf.vocab_size)
            found["full_kl"] = onto_tokens(exact, micro)
        return found

    def statistics(self, batch: Batch, max_tokens: int, reference: "Policy | None" = None) -> dict[str, torch.Tensor]:
        """ "logprobs" and "entropy" [N] fp32 of every token that loss_mask marks, 0 elsewhere.

        With a reference, whose hidden states are in batch.ref_hidden, also "full_kl" [N]: KL(policy || reference) over
        the whole vocabulary of the distribution that the token was drawn from.
        """
        return self._map(batch, max_tokens, lambda logits, micro: self._statistics(logits, micro, reference=reference))

    def logprobs(
        self, batch: Batch, max_tokens: int, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy [N] fp32 of every token that loss_mask marks; 0 elsewhere.

        Args:
            batch: this rank's share; at least one sequence.
            max_tokens: tokens per micro-batch; changes memory and speed only.
            temperature: another than the policy's own.
        """
        found = self._map(batch, max_tokens, lambda logits, micro: self._statistics(logits, micro, temperature))
        return found["logprobs"], found["entropy"]

    def logprobs_and_hidden(self, batch: Batch, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [N] as in `logprobs`, and the last hidden states [N, H] that the logits were made from."""
        seen: list[torch.Tensor] = []

        def on_output(logits, micro):
            hidden = seen.pop()
            if self.layout.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, group=self.layout.groups.tp)
            return {
                "logprobs": self._statistics(logits, micro)["logprobs"],
                "hidden": hidden[: len(micro.tokens), 0],
            }

        watch = self.unwrapped.output_layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
        found = self._map(batch, max_tokens, on_output)
        watch.remove()
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
    ) -> dict[str, float]:
        """Forward and backward of one mini-batch: afterwards main_grad holds d(sum of token_weights * loss), reduced.

        Args:
            batch: this rank's share of the mini-batch with `token_weights` filled, or a placeholder.
            token_loss: (logprobs [N], entropy [N], micro-batch) -> (loss [N], metrics by name, each [N]).
            max_tokens: tokens per micro-batch; changes memory and speed only.
            reference: token_loss then takes the exact KL [N] to it as well; batch.ref_hidden is filled.
            whole_groups: keep the sequences of a group in one micro-batch.

        Returns:
            "loss", the weighted sum over all ranks; each metric's mean over the mini-batch's loss_mask tokens; and
            "tokens", how many those are.
        """

        def output_loss(logits, micro):
            logprobs, entropy, *exact = self._statistics(logits, micro, reference=reference).values()
            return token_loss(logprobs, entropy, micro, *exact)

        return self._gradients(batch, output_loss, max_tokens, whole_groups)

    def update(self, *arguments, **keywords) -> dict[str, float]:
        """One optimizer step on a mini-batch: `gradients` of these arguments, clip, Adam, schedule.

        Returns:
            what `gradients` returns, and "grad_norm" (before clipping) and "lr".

        Raises:
            MegarlError: the gradient is not finite; the weights are then not to be trusted.
        """
        return self._step(self.gradients(*arguments, **keywords))
