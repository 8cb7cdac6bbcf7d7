"""Triton kernels, each beside its plain-PyTorch reference; they know tensors only."""
