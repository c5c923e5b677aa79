"""Model families: one file each, found by the `model_type` of the checkpoint's config.json."""

import importlib
import pkgutil
from types import ModuleType

_SHARED = {"attention", "build", "dense", "heads", "hf_files", "supported", "weights"}


def names() -> list[str]:
    """The families megarl can build, by Hugging Face `model_type`."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def get(model_type: str) -> ModuleType:
    """The family's file: `transformer_fields(hf)`, `weight_table(hf)` and `check(hf)`.

    Raises:
        ValueError: the family is unknown; lists the known ones.
    """
    if model_type not in names():
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{model_type}")
