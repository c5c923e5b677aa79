"""Examples for supervised training: a prompt and the answer to learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from megarl.config.data import DataFile, SFTDataConfig
from megarl.data.files import Row, load_rows
from megarl.data.order import Mixture, Order
from megarl.data.prompts import encoded, prompt_of
from megarl.data.tokenizer import PromptEncoder, encode_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = tuple[np.ndarray, np.ndarray]  # prompt ids [P] int32; answer ids [T] int32, end-of-sequence token last
ExampleSet = Mixture[Example]  # iterate for all examples; .files, .weights, .report
ExampleOrder = Order[Example]  # ExampleOrder(example_set, seed, shuffle).take(train_batch_size): one batch


def load_examples(
    config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "val"] = "train"
) -> ExampleSet:
    """The examples of data.train_files or data.val_files (an empty set where there are none).

    Raises ValueError, which names file and row, for a row without prompt or response, a response that is no text, an
    example over data.max_length (unless data.filter_overlong drops it), and all that `load_rows` refuses.
    """
    files = config.train_files if split == "train" else config.val_files
    encode_prompt = PromptEncoder(tokenizer)
    known_answers: dict[str, np.ndarray] = {}

    def example(row: Row) -> Example:
        prompt = encoded(row, prompt_of(row, config.prompt_key), encode_prompt)
        response = _response_of(row, config.response_key)
        if response not in known_answers:
            known_answers[response] = encode_answer(tokenizer, response)
        return prompt, known_answers[response]

    examples, report = [], []
    for file, rows in zip(files, load_rows(files), strict=True):
        kept, line = _fit(file, rows, [example(row) for row in rows], config)
        examples.append(kept)
        report += [line] if line else []
    return ExampleSet(examples, [file.weight for file in files], report)


def _response_of(row: Row, response_key: str) -> str:
    response = row.columns.get(response_key)
    if response is None:
        raise ValueError(
            f"{row.where} has no {response_key} column; its columns are {', '.join(row.columns)}. "
            "Name the right one with data.response_key"
        )
    if not isinstance(response, str):
        raise ValueError(f"{row.where}: {response_key} must be a text, not a {type(response).__name__}")
    return response


def _fit(
    file: DataFile, rows: list[Row], examples: list[Example], config: SFTDataConfig
) -> tuple[list[Example], str | None]:
    """The examples that fit data.max_length, and a line on how many did not."""
    lengths = [len(prompt) + len(response) for prompt, response in examples]
    overlong = [place for place, length in enumerate(lengths) if length > config.max_length]
    if not overlong:
        return examples, None
    count = f"{len(overlong)} of {len(examples)} examples in {file.path}"
    first = f"the first is {rows[overlong[0]].where} with {lengths[overlong[0]]} tokens"
    if not config.filter_overlong:
        raise ValueError(
            f"{count} are over data.max_length={config.max_length}; {first}. "
            "Raise data.max_length, or drop such examples with data.filter_overlong=true"
        )
    kept = [example for example, length in zip(examples, lengths, strict=True) if length <= config.max_length]
    if not kept:
        raise ValueError(f"every example in {file.path} is over data.max_length={config.max_length}; {first}. Raise it")
    return kept, f"dropped {count} over data.max_length={config.max_length}; {first}"
