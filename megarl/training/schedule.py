"""Micro-batches through Megatron's own pipeline schedules."""

from collections.abc import Callable, Iterator

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.models.attention import pack_sequences
from megarl.parallel.layout import Layout
from megarl.types import Batch

Outputs = dict[str, torch.Tensor]
OnOutput = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Outputs]]


def _pad_to(tokens: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(tokens) % multiple
    return torch.nn.functional.pad(tokens, (0, missing))


def _output(model: torch.nn.Module, micro: Batch, layout: Layout) -> torch.Tensor:
    """The head's output [N, ...] of a packed micro-batch, or of hidden states this rank's; the row is padded where
    sequence parallelism asks for it.
    """
    multiple = layout.tp_size if layout.sequence_parallel else 1
    tokens, position_ids = _pad_to(micro.tokens, multiple), _pad_to(micro.position_ids, multiple)
    output = model(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        attention_mask=None,
        packed_seq_params=pack_sequences(micro.cu_seqlens, len(tokens)),
    )
    return output[0, : len(micro.tokens)]


def run(
    model: torch.nn.Module, micro_batches: list[Batch], on_output: OnOutput, layout: Layout, forward_only: bool
) -> list[Outputs]:
    """Forward (and backward) over the micro-batches; gradients add up in main_grad and are reduced after the last.

    Args:
        model: DDP-wrapped for training, plain for forward only.
        micro_batches: at least one; all ranks of a model replica pass the same.
        on_output: (the head's output, micro-batch) -> (scalar loss, tensors to keep); the output is logits
            [N, V_padded / tp], values [N, 1] fp32 of a value head, or hidden states [N, H] (under sequence parallelism
            this rank's [N_padded / tp, H]) of a model without its output layer. The loss is a weighted
            sum whose weights come from global counts: it is neither divided by the number of micro-batches nor averaged
            over data-parallel ranks (`calculate_per_token_loss` with a token count of 0 does that in Megatron).
        layout: process groups.
        forward_only: no backward; call under torch.no_grad().

    Returns:
        what `on_output` kept, one dict per micro-batch.
    """

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
        micro = next(batches)

        def loss_function(output: torch.Tensor):
            loss, kept = on_output(output, micro)
            return loss, torch.zeros((), dtype=torch.int, device=output.device), kept

        return _output(model, micro, layout), loss_function

    return get_forward_backward_func(pp_size=1, vp_size=None)(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=max(len(micro.tokens) for micro in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=layout.groups,
    )
