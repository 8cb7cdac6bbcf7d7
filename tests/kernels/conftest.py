"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    pytest.importorskip("triton")
