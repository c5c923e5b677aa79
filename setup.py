"""Packaging of megarl. `make setup` prepares the CPU environment; README.md tells the GPU install.

csrc/*.cu are compiled where a CUDA build of torch and nvcc can be seen (`pip install --no-build-isolation`), for
csrc/compile.py's architectures and those of TORCH_CUDA_ARCH_LIST; csrc/*.cpp where a C++ compiler is (CXX, or c++), for
compile.py's levels of x86-64. MEGARL_BUILD_CUDA=0 and MEGARL_BUILD_CPU=0 skip the one and the other. A .cpp that does
not compile is no error: torch computes the same.
"""

import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

here = Path(__file__).parent
readme = here / "README.md"
spec = importlib.util.spec_from_file_location("compile", here / "csrc/compile.py")
spec.loader.exec_module(compiler := importlib.util.module_from_spec(spec))


CUDA = ("logprob", "logprob_kl")
CPU = (*CUDA, "linear_logprob")


def why_not_cuda() -> str | None:
    """What keeps csrc/*.cu from being compiled; None: nothing."""
    if os.environ.get("MEGARL_BUILD_CUDA") == "0":
        return "MEGARL_BUILD_CUDA=0"
    if importlib.util.find_spec("torch") is None:
        return "no torch in the build's environment (pip install --no-build-isolation shows it the installed one)"
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if compiler.find_nvcc() else "nvcc is neither in CUDA_HOME nor on PATH"


def why_not_cpu() -> str | None:
    """What keeps csrc/*.cpp from being compiled; None: nothing."""
    if os.environ.get("MEGARL_BUILD_CPU") == "0":
        return "MEGARL_BUILD_CPU=0"
    return None if compiler.find_cpp() else "no C++ compiler (CXX, or c++ on PATH) for an x86-64 processor"


class CpuKernels(Extension):
    """An op's kernels for one level of processors; no error where they do not compile."""

    def __init__(self, op: str, level: str):
        self.level = level
        source = Path(f"csrc/{op}.cpp")
        super().__init__(f"megarl.csrc.{compiler.cpu_library(source, level).stem}", [str(source)], optional=True)


class BuildKernels(build_ext):
    """Each Extension is a shared library of plain C functions, made of one .cu or .cpp file by its compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, extension: Extension) -> None:
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        (source,) = (here / name for name in extension.sources)
        if isinstance(extension, CpuKernels):
            self.spawn(compiler.cpu_command(compiler.find_cpp(), source, library, extension.level))
        else:
            architectures = compiler.architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
            self.spawn(compiler.command(compiler.find_nvcc(), source, library, architectures))


def kernels() -> list[Extension]:
    """What there are compilers for; the rest, and why it is left out, is said."""
    found = []
    if reason := why_not_cuda():
        print(f"megarl: csrc/*.cu are not compiled, GPU kernels are Triton's: {reason}", file=sys.stderr)
    else:
        found += [Extension(f"megarl.csrc.lib{op}", [f"csrc/{op}.cu"]) for op in CUDA]
    if reason := why_not_cpu():
        print(f"megarl: csrc/*.cpp are not compiled, on a CPU torch computes the same: {reason}", file=sys.stderr)
    else:
        found += [CpuKernels(op, level) for op, level in itertools.product(CPU, compiler.CPU_LEVELS)]
    return found


setup(
    name="megarl",
    version=re.search(r'__version__ = "(.+?)"', (here / "megarl/__init__.py").read_text()).group(1),
    description="Online reinforcement learning for language models at Megatron speed",
    long_description=readme.read_text() if readme.exists() else "",
    long_description_content_type="text/markdown",
    # megarl/csrc is a link to csrc/: the kernels are a package in the source tree, editable and in a wheel alike.
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.csrc": ["*.cu", "*.cuh", "*.cpp", "*.h"]},
    ext_modules=kernels(),
    cmdclass={"build_ext": BuildKernels},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<3",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.0,<6",
        "safetensors>=0.5",
        "pydantic>=2.9,<3",
        "pyyaml>=6",
        "typer>=0.15",
        "rich>=13.9",
        "msgspec>=0.19",
        "aiohttp>=3.10",
        "math-verify>=0.9,<1",  # rewards/math_answer.py; needs sympy, which torch brings
        "numpy>=1.26,<3",
        "matplotlib>=3.9",
        "pyarrow>=17",
    ],
    extras_require={
        "gpu": [
            "torch>=2.13,<2.14",  # what vLLM 0.32 is built for
            "megatron-core>=0.16.1,<0.20",
            "transformer-engine[pytorch]",
            "vllm>=0.32,<0.33",
            "flash-attn",
            "nvidia-modelopt",
            "wandb",
        ],
        "dev": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6", "ruff", "tensorboard", "wandb", "datasets"],
    },
    entry_points={
        "console_scripts": ["megarl = megarl.__main__:main"],
        # Every engine worker loads this by itself, wherever vLLM starts it.
        "vllm.general_plugins": ["megarl = megarl.resharding.vllm_plugin:register"],
    },
)
