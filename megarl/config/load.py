"""From YAML files and `key=value` overrides to a frozen configuration, or to one clear line per mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megarl.config import aliases
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.base import Section
from megarl.config.schema import Schema, holder, item_of, nearest, plain_keys, schema, section_of
from megarl.config.yaml_files import one_line, parse_yaml, read_yaml

Root = TypeVar("Root", bound=Section)

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Setting:
    """One key as someone wrote it: Setting("learning_rate", 1e-3, "site.yaml")."""

    spelling: str
    value: Any
    where: str

    def told(self, key: str) -> str:
        """The start of a message about it: `site.yaml: actor.optim.lr=-1 (written learning_rate)`."""
        written = f" (written {self.spelling})" if self.spelling != key else ""
        return f"{self.where}: {key}={_short(self.value)}{written}"


def load(
    root: type[Root],
    files: list[Path],
    overrides: list[str],
    algorithm_config: Callable[[str], type[AlgorithmConfig]],
    notify: Callable[[str], None] = print,
) -> Root:
    """The configuration that the files, merged from left to right, and then the `key=value` overrides give.

    Sections merge; values and lists replace each other. An override's value is read as YAML. `algorithm_config` gives
    the section class of `algorithm.name`, or raises ValueError. `notify` gets a line for every key that was written in
    another tool's spelling.

    Raises ValueError with one line per problem, each with its file, the key, the value and what is allowed.
    """
    settings = _settings(root, _layers(files, overrides), notify)
    settings = _counted_in_completions(settings, root, notify)
    algorithm = _algorithm_class(root, settings, algorithm_config)
    known = schema(root, algorithm=algorithm) if algorithm else schema(root)
    problems = _misplaced(settings, known, root)
    config, refused = _validated(root, algorithm, _tree(settings, known))
    lines = [*problems.values(), *(line for error in refused for line in _told(error, settings, known))]
    if lines:
        raise ValueError("\n".join(dict.fromkeys(lines)))
    assert config is not None
    return config


def _layers(files: list[Path], overrides: list[str]) -> list[list[Setting]]:
    """What each file, and then the command line as a whole, sets."""
    layers = [[Setting(key, value, str(file)) for key, value in _flat(read_yaml(Path(file)))] for file in files]
    last = {setting.spelling: setting for text in overrides for setting in _override(text)}
    return [*layers, list(last.values())]


def _flat(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _override(text: str) -> list[Setting]:
    spelling, equals, value = text.partition("=")
    if not equals or not spelling.strip():
        raise ValueError(f"{COMMAND_LINE}: {text!r} is not key=value, such as rollout.n=8")
    parsed = parse_yaml(value, f"{COMMAND_LINE}: {text!r}")
    return [Setting(key, inner, COMMAND_LINE) for key, inner in _flat({spelling.strip(): parsed})]


def _settings(root: type[Section], layers: list[list[Setting]], notify: Callable[[str], None]) -> dict[str, Setting]:
    """The last setting of every key, under megarl's own name."""
    sections = {key for key, field in schema(root).items() if section_of(field)}
    merged: dict[str, Setting] = {}
    for layer in layers:
        for key, setting in _own_names(root, layer, notify).items():
            # data.train_files=x and data.train_files.path=x replace each other; sections merge.
            for other in [other for other in merged if _one_holds_the_other(key, other)]:
                if not {key, other} & sections:
                    del merged[other]
            merged[key] = setting
    return merged


def _one_holds_the_other(a: str, b: str) -> bool:
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _own_names(root: type[Section], layer: list[Setting], notify: Callable[[str], None]) -> dict[str, Setting]:
    """One layer under megarl's own names. Raises ValueError where two spellings of one key disagree."""
    named: dict[str, Setting] = {}
    one_key_first = sorted(layer, key=lambda setting: len(aliases.resolve(setting.spelling, root)))
    for setting in one_key_first:
        keys = aliases.resolve(setting.spelling, root)
        if len(keys) > 1:
            keys = tuple(key for key in keys if key not in named)
        converted = Setting(setting.spelling, aliases.convert(setting.spelling, setting.value), setting.where)
        for key in keys:
            if key in named and named[key].value != converted.value:
                raise ValueError(
                    f"{setting.where}: {setting.spelling}={_short(setting.value)} and {named[key].spelling}="
                    f"{_short(named[key].value)} are the same key, {key}; keep one of them"
                )
            named[key] = converted
        if keys and keys != (setting.spelling,):
            notify(f"{setting.where}: {setting.spelling} is read as {' and '.join(keys)}")
    return named


def _counted_in_completions(
    settings: dict[str, Setting], root: type[Section], notify: Callable[[str], None]
) -> dict[str, Setting]:
    """Batch sizes that were given in prompts, times rollout.n."""
    counted = dict(settings)
    for key, setting in settings.items():
        if not isinstance(setting.value, aliases.InPrompts):
            continue
        prompts = setting.value.prompts
        n = settings["rollout.n"].value if "rollout.n" in settings else schema(root)["rollout.n"].default
        if type(prompts) is not int or type(n) is not int:  # to be refused as it was written
            counted[key] = Setting(setting.spelling, prompts, setting.where)
            continue
        counted[key] = Setting(setting.spelling, prompts * n, setting.where)
        notify(
            f"{setting.where}: {setting.spelling}={prompts} counts prompts; {key} counts completions: "
            f"{prompts} x {n} (rollout.n) = {prompts * n}"
        )
    return counted


def _algorithm_class(
    root: type[Section], settings: dict[str, Setting], algorithm_config: Callable[[str], type[AlgorithmConfig]]
) -> type[AlgorithmConfig] | None:
    """The section class that algorithm.name picks; None where the name is missing or the root has no algorithm."""
    name = settings.get("algorithm.name")
    if "algorithm" not in root.model_fields or name is None or not isinstance(name.value, str):
        return None
    try:
        return algorithm_config(name.value)
    except ValueError as error:
        raise ValueError(f"{name.where}: {error}") from error


def _misplaced(settings: dict[str, Setting], known: Schema, root: type[Section]) -> dict[str, str]:
    """A message for every key that does not exist, and for every section that is given a value."""
    problems = {}
    for key, setting in settings.items():
        if key in known and (section := section_of(known[key])) is not None:
            if setting.value not in (None, {}):  # `ref:` with nothing below it
                keys = ", ".join(section.model_fields)
                problems[key] = f"{setting.told(key)}: {key} is a section with the keys {keys}"
        elif holder(key, known) is None:
            near = near_names(key, known, root)
            remedy = f"did you mean {' or '.join(near)}?" if near else "no key has a similar name"
            problems[key] = f"{setting.told(key)}: there is no such key; {remedy}"
    if "algorithm" in known and "algorithm.name" not in settings:
        # Without the name, only the base class's keys are known: the missing name is the problem, not the others.
        problems = {key: text for key, text in problems.items() if not key.startswith("algorithm.")}
    return problems


def near_names(key: str, known: Schema, root: type[Section]) -> list[str]:
    """Keys that `key` may have been meant to be, other tools' spellings included: "rollout.n (num_generations)"."""
    own = plain_keys(known)
    near = nearest(key, own)
    if near:
        return near
    spellings = aliases.aliases_of(root)
    meant = {spellings[spelling]: spelling for spelling in reversed(nearest(key, spellings))}
    return [f"{' and '.join(keys)} ({spelling})" for keys, spelling in reversed(meant.items()) if set(keys) <= set(own)]


def _tree(settings: dict[str, Setting], known: Schema) -> dict[str, Any]:
    """The settings of known keys as nested sections: {"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        if holder(key, known) is None:
            continue
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = setting.value
    return tree


def _validated(
    root: type[Root], algorithm: type[AlgorithmConfig] | None, values: dict[str, Any]
) -> tuple[Root | None, list[dict[str, Any]]]:
    """The configuration, or pydantic's errors; the algorithm's keys are checked by the algorithm's own class."""
    errors = []
    if algorithm is not None:
        try:
            values = {**values, "algorithm": algorithm.model_validate(values["algorithm"])}
        except ValidationError as error:
            errors = [{**problem, "loc": ("algorithm", *problem["loc"])} for problem in error.errors()]
            del values["algorithm"]
    elif "algorithm" in root.model_fields:
        errors = [{"type": "missing", "loc": ("algorithm", "name")}]
        values.pop("algorithm", None)
    try:
        config = root.model_validate(values)
    except ValidationError as error:
        told = [problem for problem in error.errors() if not (errors and problem["loc"] == ("algorithm",))]
        return None, errors + told
    return config, errors


def _told(error: dict[str, Any], settings: dict[str, Setting], known: Schema) -> list[str]:
    """One of pydantic's errors in a user's words, one line per key that it is about."""
    key, rest = _key_and_rest(error["loc"], known)
    if error["type"] == "missing" and not rest and key not in settings:
        return [f"{missing} is missing: {known[missing].description}" for missing in _required(key, known)]
    problem = _problem(error, known.get(key))
    inner = ".".join([key, *(part for part in rest if isinstance(part, str))])
    if key not in settings and inner in settings:
        return [f"{settings[inner].told(inner)}: {problem}"]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    if key in settings:
        return [f"{settings[key].told(key)}{', at ' if place else ''}{place}: {problem}"]
    return [f"{key}{place}: {problem}" if key else problem]  # about several keys of one section, or of the whole


def _key_and_rest(location: tuple[str | int, ...], known: Schema) -> tuple[str, tuple[str | int, ...]]:
    """("data", "train_files", 0, "weight") -> "data.train_files" and (0, "weight")"""
    for end in range(len(location), 0, -1):
        key = ".".join(map(str, location[:end]))
        if key in known:
            return key, location[end:]
    return "", location


def _required(key: str, known: Schema) -> list[str]:
    """The plain keys without a default in a section, at any depth; a plain key itself."""
    if section_of(known[key]) is None:
        return [key]
    inner = [name for name in known if name.startswith(f"{key}.") and "." not in name.removeprefix(f"{key}.")]
    return [deeper for name in inner if known[name].is_required() for deeper in _required(name, known)]


_PROBLEMS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text; put it in quotes",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "missing": "a value is missing",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} item(s)",
    "value_error": "{error}",
}


def _problem(error: dict[str, Any], field: Any) -> str:
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        return "must be one of " + context["expected"].replace("'", "").replace(" or ", ", ")
    if error["type"] == "extra_forbidden":
        item = item_of(field) if field else None
        return "there is no such key" + (f"; known: {', '.join(item.model_fields)}" if item else "")
    if error["type"] in _PROBLEMS:
        return _PROBLEMS[error["type"]].format(**context)
    return error["msg"].replace("Input should", "must").replace("Value error, ", "")


def _short(value: Any) -> str:
    text = one_line(value.prompts if isinstance(value, aliases.InPrompts) else value)
    return text if len(text) <= 80 else text[:77] + "..."
