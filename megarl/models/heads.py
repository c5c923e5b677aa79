"""The value head: one number per token where a language model has one logit per vocabulary entry.

A critic's value of a token, a reward model's score of a sequence. In a checkpoint it is `score.weight` [1, H], as in
transformers' `...ForSequenceClassification` with num_labels=1; there is no bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megarl.models.hf_files import SCORE
from megarl.models.weights import Copy, Vocabulary, WeightTable


class ValueHead(torch.nn.Module):
    """Takes the place of a GPTModel's output layer, with its calling convention.

    forward: hidden states [N, 1, H] (under sequence parallelism this rank's N / tp) -> values [N, 1, 1] fp32, the same
    on every tensor-parallel rank. The weight is whole on each of them and starts at zero, so that the first values are
    0 whatever the layout and the seed.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Each rank then has its own tokens' part of the gradient, and Megatron sums these over the group.
        self.weight.sequence_parallel = config.sequence_parallel
        self._sequence_parallel, self._tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: torch.Tensor, **output_layer_arguments: Any) -> tuple[torch.Tensor, None]:
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:  # what follows is the same on every rank: its gradient is cut, not summed
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return values, None


def value_table(table: WeightTable) -> WeightTable:
    """The table of the same model with a value head."""
    last = tuple(entry for entry in table.last if not isinstance(entry, Vocabulary))
    return replace(table, last=(*last, Copy(SCORE, "output_layer.weight")), tied_head=None)


def value_config(hf: PretrainedConfig) -> dict[str, Any]:
    """What config.json says of such a checkpoint."""
    return {
        "architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf.model_type]],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
