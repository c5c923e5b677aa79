"""Registers and spilled bytes of the kernels, as the compilers say: read, and kept in csrc/registers.json.

A test that compiles kernels compares them with the file where its compiler is the one that wrote it.
MEGARL_RECORD_REGISTERS=1 python -m pytest tests/csrc -k "spill or hopper" writes it anew.
"""

import json
import os
import re
import subprocess
from pathlib import Path

RECORD = Path(__file__).parents[2] / "csrc" / "registers.json"

Counts = dict[str, dict[str, int]]  # by kernel: registers of a thread; its bytes of stack or spills, whichever are more


def said_by_ptxas(report: str) -> list[tuple[str, str, dict[str, int]]]:
    """[(mangled name, "sm_90", counts)] of the report that `ptxas -v` writes."""
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return [
        (name, device, {"registers": int(registers), "spilled_bytes": max(map(int, spilled))})
        for name, device, *spilled, registers in re.findall(pattern, report, flags=re.DOTALL)
    ]


def of_triton(kernel, types: dict[str, str], constants: dict[str, object], folder: Path) -> dict[str, int]:
    """Counts of a Triton kernel compiled for sm_90, which needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"]
    ptx = folder / f"{kernel.__name__}.ptx"
    ptx.write_text(compiled.asm["ptx"])
    ptxas = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
    done = subprocess.run(ptxas, capture_output=True, text=True, check=True, timeout=60)
    ((_, _, counts),) = said_by_ptxas(done.stderr)
    return counts


def assert_recorded(source: str, compiler: str, found: Counts) -> None:
    """The file has these counts of `source`'s kernels, or those of another compiler."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    entry = record.setdefault(source, {})
    if os.environ.get("MEGARL_RECORD_REGISTERS") == "1":
        kernels = found if entry.get("compiler") != compiler else entry["kernels"] | found
        record[source] = {"compiler": compiler, "kernels": dict(sorted(kernels.items()))}
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")
    elif entry.get("compiler") == compiler:
        kept = {name: entry["kernels"].get(name) for name in found}
        assert kept == found, f"{RECORD} is of other code; see {__file__} for how to write it anew"
