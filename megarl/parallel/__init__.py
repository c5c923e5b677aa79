"""Processes and devices. Importing this folder makes Megatron-core usable on this machine, whatever it has."""

from megarl.parallel import device

if not device.HAS_CUDA:
    from megarl.parallel import mcore_cpu

    mcore_cpu.install()
