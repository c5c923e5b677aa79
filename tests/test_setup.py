"""setup.py: which kernels it compiles, with what, and that it says why it leaves some out."""

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import __version__

ROOT = Path(__file__).parents[1]


def setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    given = {"MEGARL_BUILD_CPU": "0", "MEGARL_BUILD_CUDA": "0"} | environment
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, timeout=120)


def build(folder: Path, **environment: str) -> tuple[list[str], str]:
    """(the libraries that were built, what was said)."""
    done = setup("build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "temp"), **environment)
    assert done.returncode == 0, done.stderr
    return sorted(file.name for file in folder.rglob("*.so")), done.stdout + done.stderr


def compiler(path: Path, body: str) -> Path:
    """A program that notes its arguments beside itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.arguments\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


WRITES_ITS_OUTPUT = 'while [ "$1" != -o ]; do shift; done; touch "$2"'


def test_what_is_left_out_is_said_on_stderr():
    done = setup("--version")
    assert done.stdout == f"{__version__}\n"
    assert "csrc/*.cu are not compiled, GPU kernels are Triton's: MEGARL_BUILD_CUDA=0" in done.stderr
    assert "csrc/*.cpp are not compiled, on a CPU torch computes the same: MEGARL_BUILD_CPU=0" in done.stderr


def test_without_a_compiler_it_installs(tmp_path):
    assert build(tmp_path)[0] == []
    for nothing in (str(tmp_path / "nowhere"), 'g++ "'):
        built, said = build(tmp_path, MEGARL_BUILD_CPU="1", CXX=nothing)
        assert built == [] and "no C++ compiler (CXX, or c++ on PATH)" in said
    built, said = build(tmp_path, MEGARL_BUILD_CUDA="1")  # the tests' torch is a CPU build
    assert built == [] and "this torch is built without CUDA" in said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
def test_a_cpp_that_does_not_compile_is_no_error(tmp_path):
    broken = compiler(tmp_path / "broken", "echo no such instruction >&2; exit 1")
    built, said = build(tmp_path / "build", MEGARL_BUILD_CPU="1", CXX=str(broken))
    assert built == [] and "no such instruction" in said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
def test_a_library_for_every_op_and_level(tmp_path):
    cxx = compiler(tmp_path / "cxx", WRITES_ITS_OUTPUT)
    built, _ = build(tmp_path / "build", MEGARL_BUILD_CPU="1", CXX=f"{cxx} --first")
    assert built == sorted(
        f"lib{op}_cpu_{level}.so" for op in ("logprob", "logprob_kl", "linear_logprob") for level in ("avx512", "avx2")
    )
    said = Path(f"{cxx}.arguments").read_text().splitlines()
    assert [line.split()[0] for line in said] == ["--first"] * 6
    assert sum("-mavx512f" in line for line in said) == sum("-mavx2" in line for line in said) == 3


def test_cuda_sources_are_compiled_where_torch_and_nvcc_are(tmp_path):
    """With a stand-in for nvcc, and for a CUDA build of torch, which cannot be installed beside the CPU's."""
    torch = tmp_path / "site" / "torch" / "__init__.py"
    torch.parent.mkdir(parents=True)
    torch.write_text("class version: cuda = '13.0'\n")
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", WRITES_ITS_OUTPUT)
    environment = {"PYTHONPATH": str(torch.parents[1]), "CUDA_HOME": str(tmp_path / "cuda"), "MEGARL_BUILD_CUDA": "1"}
    built, _ = build(tmp_path / "build", TORCH_CUDA_ARCH_LIST="8.6;9.0a", **environment)
    assert built == ["liblogprob.so", "liblogprob_kl.so"]
    said = Path(f"{nvcc}.arguments").read_text()
    assert said.count("csrc/logprob.cu") == said.count("csrc/logprob_kl.cu") == 1
    assert all(said.count(f"arch=compute_{name},code=sm_{name}") == 2 for name in ("80", "86", "90", "90a"))
    assert build(tmp_path / "none", **environment | {"MEGARL_BUILD_CUDA": "0"})[0] == []
    compiler(nvcc, "exit 2")
    failed = setup("build_ext", "--build-lib", str(tmp_path / "failed"), **environment)
    assert failed.returncode != 0  # who asked for CUDA kernels is told that there are none
