"""How csrc/*.cu and csrc/*.cpp become shared libraries of plain C functions. setup.py and the tests run the same
commands.

Standard library only: setup.py loads this file before anything is installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
from pathlib import Path

# A100 and its like, H100 and H200; newer devices compile the PTX of the last when they first load it.
ARCHITECTURES = ("80", "90")

# torch.backends.cpu.get_cpu_capability() -> what it looks for in a processor. Without AVX2 torch's own operations are
# faster than these kernels.
CPU_LEVELS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}


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


def find_cpp() -> list[str] | None:
    """The command of the C++ compiler for this processor: CXX ("ccache g++"), or c++ on PATH; None where there are no
    kernels for the processor."""
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError:  # an open quotation: no command
        return None
    if platform.machine() not in ("x86_64", "AMD64") or shutil.which(command[0]) is None:
        return None
    return command


def cpu_library(source: Path, level: str) -> Path:
    """Where the library of `source` for processors of that level lies."""
    return source.with_name(f"lib{source.stem}_cpu_{level.lower()}.so")


def digest(source: Path) -> str:
    """What a library says of the source that it was made of, and of the headers beside that."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cpu_command(compiler: list[str], source: Path, library: Path, level: str) -> list[str]:
    """What compiles `source` to `library` for processors of that level."""
    return [
        *compiler, "-O3", "-std=c++17", *CPU_LEVELS[level], "-fno-math-errno", "-fno-trapping-math",
        "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi",
        f'-DMEGARL_DIGEST="{digest(source)}"', "-o", str(library), str(source),
    ]  # fmt: skip
