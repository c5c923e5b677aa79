"""YAML as this project reads and writes it: 1e-3 is a number, and a key may not come twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

# YAML 1.1 reads 1e-3 as a text, YAML 1.2 as a number; people mean the number.
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            if name.tag != "tag:yaml.org,2002:merge" and name.value in seen:
                twice = f"the key {name.value} comes twice"
                raise yaml.constructor.ConstructorError(problem=twice, problem_mark=name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises ValueError for a missing file, a syntax error (with its line), a key that comes twice, and a file that holds
    something else than keys.
    """
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(f"configuration file {file} {what} (looked for {file.absolute()})")
    content = parse_yaml(file.read_text(), str(file))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold `key: value` lines, not a {type(content).__name__}")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ValueError with `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error


def write_yaml(value: Any) -> str:
    """Plain Python as a YAML text that `parse_yaml` reads back equal."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if "\x85" in text:  # PyYAML writes this line break as it is, and folds it when it reads it back
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)
    return text


def one_line(value: Any) -> str:
    """A value as one would write it behind `key=`: 0.1, null, [a, b], {path: x}."""
    if isinstance(value, str):
        return value
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()
