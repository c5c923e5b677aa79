#!/usr/bin/env bash
# Train on this machine alone, from a checkout: launch/local.sh CONFIG.yaml [key=value ...]
# `megarl train` starts one process per GPU (per group of cores on a CPU) by itself; this only picks the environment.
set -euo pipefail

# Edit: the Python that has megarl (`make setup` makes .venv for the CPU; README.md tells the GPU install).
PYTHON=${MEGARL_PYTHON:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python}

# Megatron orders its collectives against its kernels with this; without a GPU it does nothing.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec "$PYTHON" -m megarl train "$@"
