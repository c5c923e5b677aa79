"""What every section shares: frozen, no unknown keys, a description on every field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are refused; `config/load.py` turns that into a message with near names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def key(default: Any = ..., description: str = "", **kwargs: Any) -> Any:
    """A config field: `key(default, "what it does, and its unit")`. `...` makes it required."""
    return Field(default, description=description, **kwargs)
