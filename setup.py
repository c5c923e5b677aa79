"""Packaging of megarl. `make setup` prepares the CPU environment; README.md tells the GPU install.

csrc/*.cu are compiled where a CUDA build of torch and nvcc can be seen (`pip install --no-build-isolation`), for
csrc/compile.py's architectures and those of TORCH_CUDA_ARCH_LIST. MEGARL_BUILD_CUDA=0 skips that.
"""

import importlib.util
import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

here = Path(__file__).parent
readme = here / "README.md"
spec = importlib.util.spec_from_file_location("compile", here / "csrc/compile.py")
spec.loader.exec_module(compiler := importlib.util.module_from_spec(spec))


KERNELS = ("logprob", "logprob_kl")


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


class BuildKernels(build_ext):
    """Each Extension is a shared library of plain C functions, made by nvcc from one .cu file."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, extension: Extension) -> None:
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        architectures = compiler.architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
        (source,) = extension.sources
        self.spawn(compiler.command(compiler.find_nvcc(), here / source, library, architectures))


reason = why_not_cuda()
print(f"megarl: GPU kernels in Triton, csrc/*.cu not compiled: {reason}" if reason else "megarl: compiling csrc/*.cu")

setup(
    name="megarl",
    version=re.search(r'__version__ = "(.+?)"', (here / "megarl/__init__.py").read_text()).group(1),
    description="Online reinforcement learning for language models at Megatron speed",
    long_description=readme.read_text() if readme.exists() else "",
    long_description_content_type="text/markdown",
    # megarl/csrc is a link to csrc/: the kernels are a package in the source tree, editable and in a wheel alike.
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.csrc": ["*.cu", "*.cuh", "*.cpp", "*.h"]},
    ext_modules=[] if reason else [Extension(f"megarl.csrc.lib{op}", [f"csrc/{op}.cu"]) for op in KERNELS],
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
