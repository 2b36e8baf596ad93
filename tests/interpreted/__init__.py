"""Triton kernels on the CPU, under Triton's interpreter: `tests/numerics/test_triton.py` runs each file in a process of
its own, since Triton decides as it is imported whether it interprets."""
