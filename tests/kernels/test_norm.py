"""RMSNorm kernels against their references, and these against transformers' rounding."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn

from nanovllm.kernels import norm
from nanovllm.kernels.norm import rms_norm_reference, rms_norm_triton

SHAPES = [(1, 64), (3, 1000), (17, 1024), (2, 2560), (5, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_reference(shape, dtype):
    x, w = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype, seed=1)
    out = rms_norm_triton(x, w, 1e-6)
    assert out.dtype == dtype
    assert_close(out, rms_norm_reference(x.float(), w.float(), 1e-6))
    assert_close(rms_norm_triton(x, None, 1e-6), rms_norm_reference(x.float(), None, 1e-6))


def test_bf16_rounds_where_transformers_rounds():
    x, w = randn(64, 128, dtype=torch.bfloat16), randn(128, dtype=torch.bfloat16, seed=2)
    h = x.float()
    expected = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    assert torch.equal(rms_norm_reference(x, w, 1e-6), expected)
    if DEVICE == "cuda":  # the interpreter truncates to bf16
        differing = (rms_norm_triton(x, w, 1e-6) != expected).float().mean()
        assert differing < 1e-3  # a sum in another order may round another way


def test_rows_of_a_strided_view_are_normalised():
    x, w = randn(9, 300), randn(100, seed=1)
    assert_close(rms_norm_triton(x[:, 100:200], w, 1e-5), rms_norm_reference(x[:, 100:200], w, 1e-5))


@pytest.mark.parametrize("shape", [(6, 1024), (9, 1000), (7, 5000)])
def test_many_rows_are_shared_by_fewer_programs(shape, monkeypatch):
    monkeypatch.setattr(norm, "LARGE_PREFILL", 6)
    x, w = randn(shape[0], 2 * shape[1])[:, shape[1] :], randn(shape[1], seed=1)
    assert_close(rms_norm_triton(x, w, 1e-6), rms_norm_reference(x, w, 1e-6))


def test_no_rows_give_no_rows():
    assert rms_norm_triton(randn(0, 64), randn(64), 1e-6).shape == (0, 64)
