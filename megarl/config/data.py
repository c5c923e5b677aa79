"""`data.*`: where prompts come from and how long they may be."""

from typing import Literal

from pydantic import field_validator

from megarl.config.base import Section, key


class DataFile(Section):
    path: str = key(..., "A .jsonl or .parquet file, or the name of a dataset on the Hugging Face hub (name[:split]).")
    weight: float = key(1.0, "Share of this file among the prompts drawn; weights are normalised over the files.", gt=0)


def _as_files(value):
    if isinstance(value, (str, dict, DataFile)):
        value = [value]
    return [{"path": item} if isinstance(item, str) else item for item in value]


def _without_weights(files: list[DataFile]) -> list[DataFile]:
    if any(file.weight != 1.0 for file in files):
        raise ValueError("weights mean nothing for held-out files, of which every prompt is used once; remove them")
    return files


class DataConfig(Section):
    train_files: list[DataFile] = key(
        ..., "Training files: a path, a list of paths, or a list of {path, weight}.", min_length=1
    )
    val_files: list[DataFile] = key([], "Held-out files, in the same forms.")
    prompt_key: str = key("prompt", "Column with the prompt: chat messages, or plain text (used as one user message).")
    train_batch_size: int = key(..., "Prompts per step; completions per step are this times rollout.n.", gt=0)
    max_prompt_length: int = key(512, "Longest prompt, in tokens.", gt=0)
    max_response_length: int = key(512, "Longest completion, in tokens.", gt=0)
    truncation: Literal["error", "left", "right"] = key(
        "error",
        "What to do with a prompt over max_prompt_length: refuse the dataset, or keep its end (left) or start (right).",
    )
    filter_overlong_prompts: bool = key(False, "Drop prompts over max_prompt_length instead, and say how many.")
    shuffle: bool = key(True, "Draw training prompts in a fresh seeded order every epoch.")

    _files = field_validator("train_files", "val_files", mode="before")(_as_files)
    _no_val_weights = field_validator("val_files")(_without_weights)


class SFTDataConfig(Section):
    train_files: list[DataFile] = key(..., "Training files, as in data.train_files of `megarl train`.", min_length=1)
    val_files: list[DataFile] = key([], "Held-out files.")
    prompt_key: str = key("prompt", "Column with the prompt: chat messages, or plain text.")
    response_key: str = key("response", "Column with the answer to learn, as text.")
    train_batch_size: int = key(..., "Examples per optimizer step, over all data-parallel ranks.", gt=0)
    max_length: int = key(1024, "Longest example, prompt and response together, in tokens.", gt=0)
    filter_overlong: bool = key(False, "Drop examples over max_length instead of refusing the dataset.")

    _files = field_validator("train_files", "val_files", mode="before")(_as_files)
    _no_val_weights = field_validator("val_files")(_without_weights)


class PairDataConfig(Section):
    train_files: list[DataFile] = key(..., "Training files, as in data.train_files of `megarl train`.", min_length=1)
    val_files: list[DataFile] = key([], "Held-out files.")
    prompt_key: str = key("prompt", "Column with the prompt: chat messages, or plain text.")
    chosen_key: str = key("chosen", "Column with the better answer: a text, or a list of one assistant message.")
    rejected_key: str = key("rejected", "Column with the worse answer, in the same forms.")
    train_batch_size: int = key(..., "Pairs per optimizer step, over all data-parallel ranks.", gt=0)
    max_length: int = key(1024, "Longest prompt and answer together, in tokens.", gt=0)
    truncation: Literal["error", "left"] = key(
        "error", "What to do with a longer one: refuse the dataset, or keep its last max_length tokens."
    )

    _files = field_validator("train_files", "val_files", mode="before")(_as_files)
    _no_val_weights = field_validator("val_files")(_without_weights)
