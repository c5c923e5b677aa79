"""Kernels, one file per op of the same name in megarl/ops; imported as megarl.csrc, through the link megarl/csrc.

Nothing here is imported until a tensor on a GPU needs it, so the CPU needs neither Triton nor a compiler.
"""
