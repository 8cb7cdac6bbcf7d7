"""SiLU times up against its reference."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn
from torch.nn import functional as F

from nanovllm.kernels.activation import silu_mul_reference, silu_mul_triton
from nanovllm.kernels.norm import PendingNorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(1, 16), (5, 100), (3, 3072), (2, 1025), (0, 64)])
def test_silu_mul_equals_the_reference(rows, width, dtype):
    x = 4 * randn(rows, 2 * width, dtype=dtype)
    out = silu_mul_triton(x)
    assert out.dtype == dtype
    assert_close(out, silu_mul_reference(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width,parts", [(5, 100, 1), (3, 1025, 12), (67, 64, 256), (0, 64, 16)])
def test_a_pending_norm_is_applied(rows, width, parts, dtype):
    x, squares = 50 * randn(rows, 2 * width, dtype=dtype), 1e4 * randn(rows, parts, seed=1).square()
    norm = PendingNorm(squares, 4 * parts, 1e-6)
    expected = silu_mul_reference(x.float() * (squares.sum(1, keepdim=True) / (4 * parts) + 1e-6).rsqrt())
    for silu_mul in (silu_mul_reference, silu_mul_triton):
        out = silu_mul(x, norm)
        assert out.dtype == dtype
        assert_close(out, expected)


def test_bf16_rounds_where_transformers_rounds():
    x = 4 * randn(16, 256, dtype=torch.bfloat16)
    expected = F.silu(x[:, :128]) * x[:, 128:]
    assert torch.equal(silu_mul_reference(x), expected)
    if DEVICE == "cuda":  # the interpreter truncates to bf16
        assert (silu_mul_triton(x) != expected).float().mean() < 1e-2


def test_large_gates_do_not_overflow():
    x = torch.cat((randn(2, 8).sign() * 1e4, randn(2, 8)), 1)
    assert silu_mul_triton(x).isfinite().all()
