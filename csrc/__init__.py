"""Kernels, one stem per op of the same name in megarl/ops; imported as megarl.csrc, through the link megarl/csrc.

`<op>.cu` is compiled by setup.py (compile.py has the commands) and called by `<op>_cuda.py`; where it is not, `<op>.py`
has the same kernels in Triton. `<op>.cpp` is for a CPU, and called by `<op>_cpu.py`; where it is not compiled, the
torch reference in megarl/ops computes the same. Nothing is imported until a tensor on its device needs it, so a CPU
needs neither Triton nor, to run, a compiler.
"""
