"""What the tests of csrc/*.cpp share: the build by setup.py's command, and copies in the layout "columns"."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from megarl.csrc import compile, libraries

FOLDER = Path(__file__).parents[2] / "csrc"
RUN_HERE = {"AVX512": ("AVX512", "AVX2"), "AVX2": ("AVX2",)}.get(torch.backends.cpu.get_cpu_capability(), ())
needs_cpp = pytest.mark.skipif(compile.find_cpp() is None, reason="needs a C++ compiler and an x86-64 processor")
LEVELS_AND_THREADS = [("AVX512", 3), ("AVX2", 3)]  # small cases are one thread's in any case


def compiled(op: str, level: str, folder: Path, signatures: libraries.Signatures) -> ctypes.CDLL:
    """The op's library for a level; any warning fails it."""
    source = FOLDER / f"{op}.cpp"
    library = folder / compile.cpu_library(source, level).name
    command = compile.cpu_command(compile.find_cpp(), source, library, level)
    done = subprocess.run([*command, "-Werror"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if level not in RUN_HERE:
        pytest.skip(f"this processor does not run {level}")
    return libraries.bind(library, signatures)


def installed(module, library: ctypes.CDLL, threads: int):
    """`with` this library behind the module's functions, on so many threads. A generator, for a fixture."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "library", lambda: library)
        yield module
    torch.set_num_threads(before)


def columns(values: torch.Tensor) -> torch.Tensor:
    """A copy with columns in one piece."""
    return values.t().clone(memory_format=torch.contiguous_format).t()
