"""Triton kernels, each beside its plain-PyTorch reference; they know tensors only.

The reference is what a CPU runs and what the tests compare with. Invariants: both agree within rounding; sums have a
fixed order, so a result does not change from run to run; offsets into caches and weights have 64 bits.
"""
