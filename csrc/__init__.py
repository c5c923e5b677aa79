"""Kernels, one stem per op of the same name in megarl/ops; imported as megarl.csrc, through the link megarl/csrc.

`<op>.cu` is compiled by setup.py (compile.py has the command) and called by `<op>_cuda.py`; where it is not, `<op>.py`
has the same kernels in Triton. Nothing here is imported until a tensor on a GPU needs it, so the CPU needs neither
Triton nor a compiler.
"""
