"""One file per algorithm, looked up by its name; what an algorithm file holds is written in interface.py."""

import importlib
import pkgutil
from types import ModuleType

# Shared by the algorithms, not algorithms themselves.
_SHARED = {
    *("aggregation", "gae", "groups", "importance", "interface", "kl", "kl_control", "metrics", "objective", "pf_ppo"),
    *("policy_loss", "policy_ratio", "reward_shaping", "sequences", "value_loss", "whitening"),
}


def names() -> list[str]:
    """The known algorithms, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)


def get(name: str) -> ModuleType:
    """The algorithm's module, imported now. Raises ValueError for an unknown name, listing the known ones."""
    if name not in names():
        raise ValueError(
            f"algorithm.name={name!r} is not known; the known algorithms are {', '.join(names())} "
            "(each is a file of megarl/algorithms)"
        )
    return importlib.import_module(f"{__name__}.{name}")
