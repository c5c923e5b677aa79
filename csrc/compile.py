"""How csrc/*.cu become lib*.so, shared libraries of plain C functions. setup.py and the tests run the same command.

Standard library only: setup.py loads this file before anything is installed.
"""

import os
import shutil
from pathlib import Path

# A100 and its like, H100 and H200; newer devices compile the PTX of the last when they first load it.
ARCHITECTURES = ("80", "90")


def find_nvcc() -> str | None:
    """The CUDA compiler: of CUDA_HOME, or of PATH."""
    home = os.environ.get("CUDA_HOME")
    return (shutil.which("nvcc", path=f"{home}/bin") if home else None) or shutil.which("nvcc")


def architectures(torch_cuda_arch_list: str = "") -> list[str]:
    """ARCHITECTURES and those that TORCH_CUDA_ARCH_LIST gives by number: of "8.6;9.0a+PTX", 80, 86, 90 and 90a."""
    asked = torch_cuda_arch_list.replace(";", " ").replace("+PTX", "").replace(".", "").split()
    names = {*ARCHITECTURES, *(name for name in asked if name[:1].isdigit())}
    return sorted(names, key=lambda name: (int(name.rstrip("af")), name))


def command(nvcc: str, source: Path, library: Path, architectures: list[str]) -> list[str]:
    """What compiles `source` to `library`: any warning fails it, and ptxas reports registers and spills."""
    code = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    newest = max((name for name in architectures if name.isdigit()), key=int)
    return [
        nvcc, "-O3", "-std=c++17", "-ftz=true", "-shared", "-cudart=shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-Werror=all-warnings", "-Xptxas=-v,--warn-on-spills",
        *code, f"-gencode=arch=compute_{newest},code=compute_{newest}", "-o", str(library), str(source),
    ]  # fmt: skip
