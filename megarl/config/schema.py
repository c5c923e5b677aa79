"""The keys of a configuration: dotted names, their fields, and which names are near."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megarl.config.base import Section

Schema = dict[str, FieldInfo]  # dotted key -> field; sections are keys too


def schema(root: type[Section], **replaced: type[Section]) -> Schema:
    """Every section and key below `root`, in the order of the fields.

    `replaced` gives a top-level section another class: schema(TrainConfig, algorithm=grpo.Config).
    """
    found: Schema = {}
    _collect(root, "", replaced, found)
    return found


def _collect(section: type[Section], prefix: str, replaced: dict[str, type[Section]], found: Schema) -> None:
    for name, field in section.model_fields.items():
        found[prefix + name] = field
        inner = replaced.get(prefix + name) or section_of(field)
        if inner is not None:
            _collect(inner, f"{prefix}{name}.", replaced, found)


def section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section; None for a plain key (a list of sections is a plain key)."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def item_of(field: FieldInfo) -> type[Section] | None:
    """The class of the items of a field that is a list of sections, such as data.train_files; else None."""
    arguments = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    item = arguments[0] if arguments else None
    return item if isinstance(item, type) and issubclass(item, Section) else None


def holder(key: str, known: Schema) -> str | None:
    """The plain key that `key` is or lies within (data.train_files.path lies within data.train_files); else None."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in known and section_of(known[prefix]) is None:
            return prefix
    return None


def plain_keys(known: Schema) -> list[str]:
    """The keys that hold values, sections left out."""
    return [name for name, field in known.items() if section_of(field) is None]


def nearest(key: str, names: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` of `names` that someone who wrote `key` may have meant, likeliest first.

    First the names that end alike (actor.lr -> actor.optim.lr), then those that are spelt alike as a whole, then those
    whose last part is spelt alike.
    """
    names = list(names)
    leaf = key.rpartition(".")[2]
    leaves = [name.rpartition(".")[2] for name in names]
    same_leaf = [name for name, other in zip(names, leaves, strict=True) if other == leaf]
    same_leaf = sorted(same_leaf, key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
    alike = difflib.get_close_matches(key, names, count, cutoff=0.75)
    like_leaves = difflib.get_close_matches(leaf, leaves, count, cutoff=0.75)
    same_as_like_leaf = [
        name for like in like_leaves for name, other in zip(names, leaves, strict=True) if other == like
    ]
    return list(dict.fromkeys(same_leaf + alike + same_as_like_leaf))[:count]


def type_text(annotation: Any) -> str:
    """A type in a user's words: "whole number or null", "one of float32, bfloat16", "list of text"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} values: {', '.join(map(type_text, arguments))}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{" + ", ".join(annotation.model_fields) + "}"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))
