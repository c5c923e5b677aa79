"""Reward functions, one file per rule: the function carries the file's name.

A reward function is called with lists of equal length, one entry per completion of one prompt:

    def reward(completions: list[str], prompts: list, ground_truth: list, **columns: list) -> list[float] | list[dict]

`completions` are texts decoded without special tokens; `prompts` are messages or texts as the dataset has them;
`columns` are `finish_reason` ("stop": an end-of-sequence token ended the completion; "length": it was cut off),
`completion_ids` (token ids), `data_source`, and the dataset's other columns; a function without **columns gets those
that it names. It returns one score per completion, or one dict per completion with "score" and further numbers to
report, such as "acc". It may be `async`. One that scores completions by comparing them says so
(`reward.compares_completions = True`): then it always sees all completions of a prompt, or none gets a score. One that
waits for others may ask for a longer deadline (`reward.timeout_seconds = 300.0`).

Functions run in worker processes (rewards/workers.py). What they raise concerns the completions they were called with;
CannotScore and MegarlError stop the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.rollout import RewardFunction


class CannotScore(ValueError):
    """The dataset or the function's settings are wrong: no completion can be scored, so the run stops."""


def get(spec: RewardFunction) -> Callable[..., list]:
    """The reward function that `spec.name` means: a file of this folder, or path/to/file.py:function.

    Raises ValueError for an unknown name (lists the known), a missing file, a file that fails on import, and a missing
    function (lists the file's).
    """
    if ":" in spec.name or spec.name.endswith(".py"):
        return _from_file(spec.name)
    if spec.name not in _files():
        raise ValueError(_unknown(spec.name))
    function = _function_named_like(spec.name)
    if function is None:
        raise ValueError(_unknown(spec.name))
    return function


def label(spec: RewardFunction) -> str:
    """The name under which scores are reported: "exact_match", or the function's name of "path/to/file.py:function"."""
    return spec.name.rpartition(":")[2]


def names() -> list[str]:
    """The reward functions of this folder."""
    return [name for name in _files() if _function_named_like(name) is not None]


def _files() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _function_named_like(name: str) -> Callable[..., list] | None:
    return _functions(importlib.import_module(f"{__name__}.{name}")).get(name)


def _functions(module: ModuleType) -> dict[str, Callable[..., list]]:
    return {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}


def _unknown(name: str) -> str:
    return f"reward function {name!r} is unknown; known: {', '.join(names())}, or your own as path/to/file.py:function"


def _from_file(name: str) -> Callable[..., list]:
    path, _, wanted = name.rpartition(":")
    if not path or not wanted or wanted.endswith(".py"):
        raise ValueError(f"reward function {name!r} names no function; write path/to/file.py:function")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"reward function {name!r}: the file {file.absolute()} does not exist")
    functions = _functions(_imported(file))
    if wanted not in functions:
        known = ", ".join(functions) or "none"
        raise ValueError(f"reward function {name!r}: {file} has no function {wanted}; it has {known}")
    return functions[wanted]


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"megarl_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {file} is not a Python file; write path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code may raise anything
        raise ValueError(f"reward file {file} fails on import: {type(error).__name__}: {error}") from error
    return module
