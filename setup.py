"""Packaging of megarl. `make setup` prepares the CPU environment; README.md tells the GPU install."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
readme = here / "README.md"

setup(
    name="megarl",
    version=re.search(r'__version__ = "(.+?)"', (here / "megarl/__init__.py").read_text()).group(1),
    description="Online reinforcement learning for language models at Megatron speed",
    long_description=readme.read_text() if readme.exists() else "",
    long_description_content_type="text/markdown",
    # megarl/csrc is a link to csrc/: the kernels are a package in the source tree, editable and in a wheel alike.
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.csrc": ["*.cu", "*.cuh", "*.cpp", "*.h"]},
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
