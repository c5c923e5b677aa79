"""What a key means, for `megarl explain KEY`, and a whole configuration as YAML, for the run folder."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from megarl.config import aliases
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import Section
from megarl.config.load import near_names
from megarl.config.schema import Schema, item_of, schema, section_of, type_text
from megarl.config.yaml_files import one_line, write_yaml


def dump(config: Section) -> str:
    """The configuration as YAML, every key included; `load` reads it back to an equal configuration."""
    return write_yaml(config.model_dump(mode="json"))


def explain(key: str, root: type[Section], algorithms: Mapping[str, type[AlgorithmConfig]]) -> str:
    """What `key` is: its description, type, default, limits and other spellings; of a section, its keys.

    `algorithms` gives every algorithm's section, by its name: a key of several is explained for each. An empty key
    lists the sections. Other tools' spellings are understood.

    Raises ValueError for an unknown key, with the nearest names.
    """
    if not key:
        return _section("", schema(root))
    if "algorithm" in root.model_fields and aliases.resolve(key, root) == ("algorithm.name",):
        return f"{_one('algorithm.name', schema(root), root)}\n  allowed: {', '.join(algorithms)}"
    schemas = {name: schema(root, algorithm=section) for name, section in algorithms.items()}
    schemas = schemas if "algorithm" in root.model_fields and schemas else {"": schema(root)}
    targets = [target for target in aliases.resolve(key, root) if any(target in known for known in schemas.values())]
    if not targets:
        raise ValueError(_unknown(key, root, schemas))
    paragraphs = [f"{key} is another spelling of {' and '.join(targets)}."] if targets != [key] else []
    for target in targets:
        # An algorithm's keys may differ from algorithm to algorithm; all others are told once.
        told = {name: _one(target, known, root) for name, known in schemas.items() if target in known}
        if len(set(told.values())) == 1 and not target.startswith("algorithm"):
            told = {"": next(iter(told.values()))}
        for name, text in told.items():
            paragraphs.append(f"With algorithm.name={name}:\n{text}" if name else text)
    return "\n\n".join(dict.fromkeys(paragraphs))


def _unknown(key: str, root: type[Section], schemas: Mapping[str, Schema]) -> str:
    near = dict.fromkeys(name for known in schemas.values() for name in near_names(key, known, root))
    remedy = f"did you mean {' or '.join(near)}?" if near else f"the sections are {', '.join(root.model_fields)}"
    return f"there is no key {key}; {remedy}"


def _one(key: str, known: Schema, root: type[Section]) -> str:
    field = known[key]
    if section_of(field) is not None:
        return _section(key, known)
    lines = [key, *textwrap.wrap(field.description or "", 100, initial_indent="  ", subsequent_indent="  ")]
    lines += [f"  type: {type_text(field.annotation)}", f"  default: {_default(field)}"]
    limits = _limits(field)
    lines += [f"  allowed: {limits}"] if limits else []
    item = item_of(field)
    if item is not None:
        lines += [f"  each: {name}: {inner.description}" for name, inner in item.model_fields.items()]
    others = [spelling for spelling, keys in aliases.aliases_of(root).items() if key in keys]
    lines += [f"  also read from: {', '.join(others)}"] if others else []
    return "\n".join(lines)


def _section(prefix: str, known: Schema) -> str:
    """The keys directly below a section, one line each."""
    start = f"{prefix}." if prefix else ""
    inner = [name for name in known if name.startswith(start) and "." not in name.removeprefix(start)]
    lines = [
        f"{prefix}: {known[prefix].description}" if prefix else "The sections; `megarl explain SECTION` lists its keys."
    ]
    for name in inner:
        field = known[name]
        value = "" if section_of(field) else f" ({_default(field)})"
        lines.append(f"  {name}{value}: {field.description}")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, required"
    default: Any = field.get_default(call_default_factory=True)
    return one_line(list(default) if isinstance(default, tuple) else default)


def _limits(field: FieldInfo) -> str:
    words = {Gt: ("gt", "more than"), Ge: ("ge", "at least"), Lt: ("lt", "less than"), Le: ("le", "at most")}
    told = [f"{words[type(m)][1]} {getattr(m, words[type(m)][0]):g}" for m in field.metadata if type(m) in words]
    told += [f"at least {m.min_length} item(s)" for m in field.metadata if isinstance(m, MinLen)]
    return ", ".join(told)
