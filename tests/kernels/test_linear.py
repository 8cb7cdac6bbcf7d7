"""Products of few rows, with norm, activation and residual, against their references."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn

from nanovllm.kernels.linear import (
    few_rows_splits,
    linear_add,
    linear_add_reference,
    linear_add_triton,
    norm_linear,
    norm_linear_reference,
    norm_linear_triton,
)

ROWS = [1, 2, 16, 17, 64] if DEVICE == "cuda" else [1, 3, 16, 20]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("k,n", [(128, 64), (384, 96), (1024, 128)])
@pytest.mark.parametrize("rows", ROWS)
def test_norm_linear_equals_the_reference(rows, k, n, silu, dtype):
    x, g = randn(rows, k, dtype=dtype), 1 + 0.1 * randn(k, dtype=dtype, seed=1)
    w = 0.1 * randn(n * (2 if silu else 1), k, dtype=dtype, seed=2)
    out = norm_linear_triton(x, g, 1e-6, w, silu)
    assert out.dtype == dtype and out.shape == (rows, n)
    assert_close(out, norm_linear_reference(x.float(), g.float(), 1e-6, w.float(), None, silu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("k,n", [(128, 64), (384, 96), (2048, 64)])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_add_updates_the_residual(rows, k, n, add, dtype):
    x, w, residual = randn(rows, k, dtype=dtype), 0.1 * randn(n, k, dtype=dtype, seed=1), randn(rows, n, dtype=dtype)
    expected = linear_add_reference(x.float(), w.float(), None, residual.float().clone(), add)
    for _ in range(2):  # the second time, the counters must have gone back to zero
        ours = residual.clone()
        assert linear_add_triton(x, w, ours, add) is ours
        assert_close(ours, expected)


@pytest.mark.parametrize("k,n", [(100, 30), (3000, 7), (1025, 5)])
def test_one_row_of_any_size(k, n):
    x, g, w = randn(1, k), randn(k, seed=1), randn(2 * n, k, seed=2)
    assert_close(norm_linear_triton(x, g, 1e-5, w, True), norm_linear_reference(x, g, 1e-5, w, None, True))
    assert_close(linear_add_triton(x, w, randn(1, 2 * n)), linear_add_reference(x, w, None, randn(1, 2 * n)))


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("k,n", [(128, 64), (100, 30)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_chosen_equals_the_reference(rows, k, n, bias, dtype):
    x, g, w = randn(rows, k, dtype=dtype), randn(k, dtype=dtype, seed=1), randn(2 * n, k, dtype=dtype, seed=2)
    b = randn(2 * n, dtype=dtype, seed=3) if bias else None
    assert_close(norm_linear(x, g, 1e-6, w, b, True), norm_linear_reference(x, g, 1e-6, w, b, True).float())
    residual = randn(rows, 2 * n, dtype=dtype, seed=4)
    for add in (True, False):
        expected = linear_add_reference(x, w, b, residual.clone(), add)
        assert_close(linear_add(x, w, b, residual.clone(), add), expected.float())


@pytest.mark.parametrize("n", [64, 1024, 4096, 12288])
@pytest.mark.parametrize("k", [128, 384, 1024, 2048, 3072, 12288])
def test_splits_divide_the_inner_dimension(n, k):
    assert k % (few_rows_splits(n, k) * 128) == 0


def test_sums_are_in_a_fixed_order():
    x, w, residual = randn(16, 2048), randn(64, 2048, seed=1), randn(16, 64, seed=2)
    first = linear_add_triton(x, w, residual.clone())
    repeats = 20 if DEVICE == "cuda" else 2
    assert all(torch.equal(linear_add_triton(x, w, residual.clone()), first) for _ in range(repeats))
