"""What the tests of csrc/*.cu share: the build by setup.py's command, what it must look like, and the build as C++."""

import ctypes
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from megarl.csrc import compile, libraries
from tests.csrc import registers

ROOT = Path(__file__).parents[2]
CUOBJDUMP = Path(find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {"f": "fp32", "6__half": "fp16", "13__nv_bfloat16": "bf16"}
ALL_KERNELS = {
    f"{name}_kernel<{dtype}{cap}>"
    for name in ("statistics", "backward")
    for dtype in TYPES.values()
    for cap in ("", ", cap")
}
needs_nvcc = pytest.mark.skipif(compile.find_nvcc() is None, reason="needs nvcc, in CUDA_HOME or on PATH")


def compiled(op: str, folder: Path) -> tuple[Path, str]:
    """(library, what ptxas said)."""
    library = folder / f"lib{op}.so"
    source = ROOT / "csrc" / f"{op}.cu"
    command = compile.command(compile.find_nvcc(), source, library, compile.architectures())
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return library, done.stderr


def kernel_of(line: str) -> str:
    """ "statistics_kernel<bf16, cap>" from a mangled name."""
    name, dtype, cap = re.search(
        r"(statistics_kernel|backward_kernel)I(f|6__half|13__nv_bfloat16)Lb([01])E", line
    ).groups()
    return f"{name}<{TYPES[dtype]}{', cap' if cap == '1' else ''}>"


def assert_no_kernel_spills(op: str, report: str) -> None:
    """Two blocks of 512 threads fit into the 65,536 registers of a multiprocessor, for sm_80 and sm_90."""
    found = {f"{kernel_of(name)} {device}": counts for name, device, counts in registers.said_by_ptxas(report)}
    assert found.keys() == {f"{kernel} {device}" for kernel in ALL_KERNELS for device in ("sm_80", "sm_90")}
    for kernel, counts in found.items():
        assert counts["spilled_bytes"] == 0 and counts["registers"] <= 64, kernel
    version = subprocess.run([compile.find_nvcc(), "--version"], check=True, capture_output=True, text=True).stdout
    registers.assert_recorded(f"{op}.cu", re.search(r"V[\d.]+", version)[0].replace("V", "nvcc "), found)


def assert_moves_of_16_bytes(library: Path, loads: int, stores: int) -> None:
    """At least so many in every kernel; stores in backward kernels alone."""
    sass = subprocess.run([CUOBJDUMP, "-sass", library], check=True, capture_output=True, text=True).stdout
    kernels = sass.split("Function : ")[1:]
    assert len(kernels) == 2 * len(ALL_KERNELS)
    for kernel in kernels:
        name = kernel_of(kernel.splitlines()[0])
        assert len(re.findall(r"\bLDG\.E\.128", kernel)) >= loads, name
        assert (len(re.findall(r"\bSTG\.E\.128", kernel)) >= stores) == name.startswith("backward"), name
        assert not re.search(r"\b(LDL|STL)\b", kernel), name


def exported(library: Path) -> set[str]:
    """The library's own functions; loading it needs CUDA's runtime, which a CUDA build of torch brings."""
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)
    return {name for line in symbols.stdout.splitlines() if (name := line.split()[-1]).startswith("megarl")}


def as_cpp(op: str, folder: Path, signatures: libraries.Signatures) -> ctypes.CDLL:
    """The source as a library for the CPU, its kernels' threads taking turns (host/cuda_runtime.h)."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = folder / f"lib{op}.so"
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'tests/csrc/host'}", "-x", "c++"]
    subprocess.run([*command, ROOT / "csrc" / f"{op}.cu", "-o", library], check=True, timeout=240)
    return libraries.bind(library, signatures)


def launches_of(bound: ctypes.CDLL):
    """What stands for a module's `_launch` when the library is `as_cpp`."""

    def launch(name, device, *arguments):
        assert getattr(bound, name)(*arguments, None) == 0

    return launch
