"""One reward worker: a plain process that calls reward functions (`python -m megarl.rewards.worker --channel FD`).

It reads requests from an inherited socket, one at a time, and answers each; what a function prints goes to the driver's
log. A worker may be killed at any time: rewards/workers.py starts another.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import math
import numbers
import os
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from megarl import rewards
from megarl.errors import MegarlError

LENGTH = struct.Struct("<Q")  # in front of every frame


class Function(msgspec.Struct):
    """A configured reward function: what to import, and what to call it with besides the samples."""

    name: str
    kwargs: dict[str, Any]
    conversational: bool


class Ready(msgspec.Struct, tag=True):
    """Every function has been imported; what each says of itself."""

    compares: list[bool]  # it scores completions by comparing them
    timeouts: list[float | None]  # the deadline that it asks for, in seconds


class Request(msgspec.Struct):
    function: int
    each: dict[str, list[Any]]  # one entry per completion
    shared: dict[str, Any]  # the prompt's columns: the same for all its completions


class Scored(msgspec.Struct, tag=True):
    columns: dict[str, list[float]]  # "score" and the function's further keys, one number per completion
    invalid: dict[int, str]  # completions whose value is no finite number, and what it is


class Raised(msgspec.Struct, tag=True):
    """The function raised: another completion may fare better."""

    message: str
    traceback: str


class Refused(msgspec.Struct, tag=True):
    """No completion can be scored so: the run stops. `environment`: a MegarlError rather than a ValueError."""

    message: str
    environment: bool


Reply = Ready | Scored | Raised | Refused


def encode(value: Any) -> bytes:
    """The frame of a message: msgpack with its length in front."""
    payload = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(payload)) + payload


def main() -> None:
    parser = argparse.ArgumentParser(prog="megarl.rewards.worker")
    parser.add_argument("--channel", type=int, required=True, help="inherited file descriptor of the socket")
    descriptor = parser.parse_args().channel
    os.set_inheritable(descriptor, False)  # the driver reads this process's end off it: no child may hold it open
    channel = socket.socket(fileno=descriptor).makefile("rwb")

    def send(reply: Reply) -> None:
        channel.write(encode(reply))
        channel.flush()

    specs = _receive(channel, list[Function])
    try:
        functions = [load(spec) for spec in specs]
    except ValueError as error:
        return send(Refused(str(error), environment=False))
    compares = [getattr(function, "compares_completions", False) for function in functions]
    send(Ready(compares, [getattr(function, "timeout_seconds", None) for function in functions]))
    while True:
        try:
            request = _receive(channel, Request)
        except EOFError:
            return
        spec, function = specs[request.function], functions[request.function]
        send(answer(function, spec, request.each, request.shared))


def load(spec: Function) -> Callable[..., Any]:
    """The function, imported. ValueError when it does not exist or takes no argument that its kwargs name."""
    function = rewards.get(spec)
    unknown = [name for name in spec.kwargs if not takes(function, name)]
    if unknown:
        known = ", ".join(inspect.signature(function).parameters)
        raise ValueError(f"reward function {spec.name!r} takes no argument {unknown[0]!r} (kwargs); it takes {known}")
    return function


def answer(function: Callable[..., Any], spec: Function, each: dict[str, list], shared: dict[str, Any]) -> Reply:
    """Call the function on some completions of one prompt and check what it returns.

    `each` holds "completions" (texts), "prompts", "finish_reason" and "completion_ids", [n] each; of all these and the
    shared columns, a function without **columns gets those that it names.
    """
    count = len(each["completions"])
    arguments = {name: [value] * count for name, value in shared.items()} | each
    if spec.conversational:
        texts = each["completions"]
        arguments["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    arguments = {name: value for name, value in (arguments | spec.kwargs).items() if takes(function, name)}
    missing = [name for name in _required(function) if name not in arguments]
    if missing:
        has = ", ".join([*each, *shared])
        return Refused(f"needs a column {missing[0]!r}, which the dataset does not have; it has {has}", False)
    try:
        values = function(**arguments)
        values = asyncio.run(values) if inspect.iscoroutine(values) else values
    except MegarlError as error:
        return Refused(str(error), environment=True)
    except rewards.CannotScore as error:
        return Refused(str(error), environment=False)
    except (Exception, SystemExit) as error:  # a user's function may raise anything; the driver names the sample
        return Raised(f"{type(error).__name__}: {error}", traceback.format_exc())
    return checked(values, count)


def checked(values: Any, count: int) -> Scored | Refused:
    """The values as columns of numbers; Refused when they are not one per completion, or dicts that do not match."""
    try:
        values = list(values)
    except TypeError:
        return Refused(f"returned {_short(values)}; it must return a list with one number per completion", False)
    if len(values) != count:
        return Refused(
            f"returned {len(values)} values for {count} completions; it must return one number (or one dict with a "
            "'score') per completion",
            environment=False,
        )
    rows = [value if isinstance(value, dict) else {"score": value} for value in values]
    invalid: dict[int, str] = {}
    for place, row in enumerate(rows):
        if "score" not in row or row.keys() != rows[0].keys():
            return Refused(
                f"returned a dict with the keys {sorted(map(str, row))}; every dict must have the same keys, 'score' "
                f"among them (the first completion's has {sorted(map(str, rows[0]))})",
                environment=False,
            )
        wrong = [f"{key}={_short(value)}" for key, value in row.items() if not _is_finite_number(value)]
        if wrong:
            invalid[place] = f"{wrong[0]}, which is not a finite number"
    columns = {
        str(key): [0.0 if place in invalid else float(row[key]) for place, row in enumerate(rows)] for key in rows[0]
    }
    return Scored(columns, invalid)


def _is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # 10**400 is no float
        return False


def takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [one.name for one in by_name if one.default is one.empty]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


def _receive(channel: BinaryIO, type: Any) -> Any:
    header = channel.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return msgspec.msgpack.decode(channel.read(LENGTH.unpack(header)[0]), type=type)


if __name__ == "__main__":
    main()
