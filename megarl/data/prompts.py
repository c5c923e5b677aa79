"""Prompts from datasets in the layout that people have from verl and TRL.

A row holds `prompt` (chat messages or plain text; another column with data.prompt_key), and may hold `data_source`,
`reward_model: {ground_truth}` or `ground_truth`, and any other columns, which reward functions receive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.data import DataConfig, DataFile
from megarl.data.files import Row, load_rows
from megarl.data.order import Mixture, Order
from megarl.data.tokenizer import PromptEncoder
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptOrder", "PromptSet", "load_prompts", "load_rows"]

PromptSet = Mixture[Prompt]  # .files: list[list[Prompt]], .weights, .report
PromptOrder = Order[Prompt]  # PromptOrder(prompt_set, seed, shuffle).take(n); .state() and .restore(state)

# What a reward function is called with besides the dataset's columns.
REWARD_ARGUMENTS = ("completions", "completion_ids", "prompts", "finish_reason")


def load_prompts(files: list[DataFile], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `files`, one list per file, with the files' weights and a report of what was dropped or cut.

    `Prompt.id` counts rows over the files in their order, dropped ones included. Plain text is one user message where
    the tokenizer has a chat template, else raw text. Every prompt has the same `columns`, None where its row has none.

    Raises ValueError, which names file and row, for rows without a prompt, prompts over data.max_prompt_length (unless
    data.filter_overlong_prompts or data.truncation says otherwise), and all that `load_rows` refuses.
    """
    encode = PromptEncoder(tokenizer)
    prompts, report, first_id = [], [], 0
    for file, rows in zip(files, load_rows(files), strict=True):
        read = [_prompt(row, first_id + position, config, encode) for position, row in enumerate(rows)]
        kept, line = _fit(file.path, rows, read, config)
        prompts.append(kept)
        report += [line] if line else []
        first_id += len(rows)
    return PromptSet(_level_columns(prompts), [file.weight for file in files], report)


def _prompt(row: Row, prompt_id: int, config: DataConfig, encode: PromptEncoder) -> Prompt:
    messages = prompt_of(row, config.prompt_key)
    ground_truth = row.columns.get("ground_truth")
    if ground_truth is None and isinstance(row.columns.get("reward_model"), dict):
        ground_truth = row.columns["reward_model"].get("ground_truth")
    taken = (config.prompt_key, "ground_truth", "data_source")
    columns = {name: value for name, value in row.columns.items() if name not in taken}
    clash = [name for name in REWARD_ARGUMENTS if name in columns]
    if clash:
        raise ValueError(
            f"{row.where}: the column {clash[0]} has the name of an argument that reward functions get "
            f"({', '.join(REWARD_ARGUMENTS)}); rename the column"
        )
    return Prompt(
        id=prompt_id,
        token_ids=encoded(row, messages, encode),
        messages=messages,
        ground_truth=ground_truth,
        data_source=str(row.columns.get("data_source") or ""),
        columns=columns,
    )


def prompt_of(row: Row, prompt_key: str) -> list[dict[str, Any]] | str:
    """The row's prompt: a list of messages, each with `role` and `content`, or a text. Raises ValueError otherwise."""
    prompt = row.columns.get(prompt_key)
    if prompt is None:
        raise ValueError(
            f"{row.where} has no {prompt_key} column; its columns are {', '.join(row.columns) or '(none)'}. "
            "Name the right one with data.prompt_key"
        )
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{row.where}: {prompt_key} must be a text or a list of messages, not {_short(prompt)}")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"{row.where}: every message of {prompt_key} needs role and content; got {_short(message)}"
            )
    return prompt


def encoded(row: Row, prompt: list[dict[str, Any]] | str, encode: PromptEncoder) -> np.ndarray:
    """The prompt's ids, [P] int32; an error of tokenizer or chat template is told with the row's place."""
    try:
        return encode(prompt)
    except Exception as error:  # a chat template raises what it likes (roles must alternate, ...)
        raise ValueError(f"{row.where}: {error}") from error


def _fit(path: str, rows: list[Row], prompts: list[Prompt], config: DataConfig) -> tuple[list[Prompt], str | None]:
    """The prompts that fit data.max_prompt_length, and a line on what happened to the others."""
    limit = config.max_prompt_length
    overlong = [place for place, prompt in enumerate(prompts) if len(prompt.token_ids) > limit]
    if not overlong:
        return prompts, None
    count = f"{len(overlong)} of {len(prompts)} prompts in {path}"
    first = f"the first is {rows[overlong[0]].where} with {len(prompts[overlong[0]].token_ids)} tokens"
    if config.filter_overlong_prompts:
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        if not kept:
            raise ValueError(f"every prompt in {path} is over data.max_prompt_length={limit}; {first}. Raise the limit")
        return kept, f"dropped {count} over data.max_prompt_length={limit}; {first}"
    if config.truncation == "error":
        raise ValueError(
            f"{count} are over data.max_prompt_length={limit}; {first}. Raise data.max_prompt_length, drop such "
            "prompts with data.filter_overlong_prompts=true, or cut them with data.truncation=left or right"
        )
    part, kept = (slice(-limit, None), "last") if config.truncation == "left" else (slice(limit), "first")
    cut = [replace(prompt, token_ids=prompt.token_ids[part]) for prompt in prompts]
    return cut, f"cut {count} to their {kept} {limit} tokens; {first}"


def _level_columns(prompts: list[list[Prompt]]) -> list[list[Prompt]]:
    """Every prompt with every column, in one order."""
    names = dict.fromkeys(name for file in prompts for prompt in file for name in prompt.columns)
    return [
        [replace(prompt, columns={name: prompt.columns.get(name) for name in names}) for prompt in file]
        for file in prompts
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
