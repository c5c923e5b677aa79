"""Rows out of dataset files: .jsonl, .parquet, and names on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.data import DataFile

HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<split>\S+))?")
FILE_EXTENSIONS = {".arrow", ".csv", ".gz", ".json", ".jsonl", ".parquet", ".tsv", ".txt", ".yaml", ".zip", ".zst"}


@dataclass(frozen=True)
class Row:
    """One row and where it lies, for messages: Row({"prompt": "07+45="}, "train.jsonl line 8")."""

    columns: dict[str, Any]
    where: str


def load_rows(files: list[DataFile]) -> list[list[Row]]:
    """The rows of each file, in the file's order; one list per file.

    Raises ValueError for a missing file, an extension other than .jsonl or .parquet, a malformed line (with its
    number), an empty dataset, and a hub name that cannot be loaded.
    """
    return [read_rows(file.path) for file in files]


def read_rows(path: str) -> list[Row]:
    """The rows of one dataset; errors as in `load_rows`."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"dataset {path} is a folder; name a .jsonl or .parquet file in it")
    if file.is_file():
        rows = _read_file(file)
    elif _looks_like_a_file(path):
        raise ValueError(f"dataset {path} does not exist (looked for {file.absolute()})")
    else:
        rows = _read_hub(path)
    if not rows:
        raise ValueError(f"dataset {path} is empty: it needs at least one row")
    return rows


def _looks_like_a_file(path: str) -> bool:
    return Path(path).suffix in FILE_EXTENSIONS or path.startswith((".", "~")) or not HUB_NAME.fullmatch(path)


def _read_file(file: Path) -> list[Row]:
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".parquet":
        return _read_parquet(file)
    raise ValueError(
        f"dataset {file} has the extension {file.suffix or '(none)'}; "
        "allowed: .jsonl (one JSON object per line) and .parquet"
    )


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                columns = json.loads(line)
            except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
                raise ValueError(f"{where} is not valid JSON: {error}") from error
            if not isinstance(columns, dict):
                raise ValueError(
                    f"{where} holds a JSON {type(columns).__name__}; every line must be an object with columns"
                )
            rows.append(Row(columns, where))
    return rows


def _read_parquet(file: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"dataset {file} cannot be read as parquet: {error}") from error
    return [Row(columns, f"{file} row {number}") for number, columns in enumerate(table.to_pylist())]


def _read_hub(path: str) -> list[Row]:
    import datasets

    match = HUB_NAME.fullmatch(path)
    assert match is not None
    name, split = match["name"], match["split"] or "train"
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # every library below raises its own kind for no network, no such name, no such split
        raise ValueError(
            f"dataset {path} is neither a file here nor a hub dataset that could be loaded "
            f"(name {name}, split {split}): {_first_line(error)}. Without a network, give a .jsonl or .parquet file"
        ) from error
    return [Row(columns, f"{path} row {number}") for number, columns in enumerate(dataset.to_list())]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
