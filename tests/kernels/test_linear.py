"""Products of few rows, with norm, activation and residual, against their references."""

from types import SimpleNamespace

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn

from nanovllm.kernels._triton import shared_memory
from nanovllm.kernels.linear import (
    _BLOCK_K,
    _fits,
    few_rows_tile,
    linear_add,
    linear_add_reference,
    linear_add_triton,
    norm_linear,
    norm_linear_reference,
    norm_linear_triton,
)

ROWS = [1, 2, 16, 17, 64] if DEVICE == "cuda" else [1, 3, 20]
MANY_ROWS = [65, 67, 128, 192, 255, 256] if DEVICE == "cuda" else [67, 130]
SPLIT = (2048, 128) if DEVICE == "cuda" else (1024, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("k,n", [(128, 64), (384, 96), (1024, 128)])
@pytest.mark.parametrize("rows", ROWS)
def test_norm_linear_equals_the_reference(rows, k, n, silu, dtype):
    x, w = randn(rows, k, dtype=dtype), 0.1 * randn(n * (2 if silu else 1), k, dtype=dtype, seed=2)
    expected = norm_linear_reference(x.float(), 1e-6, w.float(), None, silu)
    for squares in (None, *(x.float().square().unflatten(1, (-1, size)).sum(2) for size in (32, 1, k))):
        out = norm_linear_triton(x, squares, 1e-6, w, silu)
        assert out.dtype == dtype and out.shape == (rows, n)
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    "rows,k,n",
    [(rows, *shape) for rows in ROWS for shape in ((128, 64), (384, 96), (2048, 64), (128, 4096), (4096, 64))]
    + [(rows, *shape) for rows in MANY_ROWS for shape in ((384, 192), SPLIT)],
)
def test_linear_add_updates_the_residual(rows, k, n, add, dtype):
    x, w, residual = randn(rows, k, dtype=dtype), 0.1 * randn(n, k, dtype=dtype, seed=1), randn(rows, n, dtype=dtype)
    expected = linear_add_reference(x.float(), w.float(), None, residual.float().clone(), add)
    for _ in range(2):  # the second time, the counters must have gone back to zero
        ours = residual.clone()
        squares = linear_add_triton(x, w, ours, add)
        assert_close(ours, expected)
        assert (squares is None) == (rows == 1)
        if squares is not None:
            assert squares.shape == (rows, n // (64 if n >= 4096 or rows > 64 else 32))
            assert_close(squares, ours.float().square().unflatten(1, (squares.shape[1], -1)).sum(2))


@pytest.mark.parametrize("k,n", [(100, 30), (3000, 7), (1025, 5)])
def test_one_row_of_any_size(k, n):
    x, w, ours = randn(1, k), randn(2 * n, k, seed=2), randn(1, 2 * n)
    assert_close(norm_linear_triton(x, None, 1e-5, w, True), norm_linear_reference(x, 1e-5, w, None, True))
    expected = linear_add_reference(x, w, None, ours.clone())
    assert linear_add_triton(x, w, ours) is None
    assert_close(ours, expected)


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("k,n", [(128, 64), (100, 30)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_chosen_equals_the_reference(rows, k, n, bias, dtype):
    x, w = randn(rows, k, dtype=dtype), randn(2 * n, k, dtype=dtype, seed=2)
    b = randn(2 * n, dtype=dtype, seed=3) if bias else None
    residual = randn(rows, 2 * n, dtype=dtype, seed=4)
    for add in (True, False):
        ours = residual.clone()
        squares = linear_add(x, w, b, ours, add)
        assert_close(ours, linear_add_reference(x, w, b, residual.clone(), add).float())
        w2 = 0.1 * randn(64, 2 * n, dtype=dtype, seed=5)
        expected = norm_linear_reference(ours, 1e-6, w2, None, True)
        out, norm = norm_linear(ours, squares, 1e-6, w2, None, True)
        assert norm is None
        assert_close(out, expected.float())


@pytest.mark.parametrize("rows", [5, 67])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_with_its_norm_pending_becomes_the_reference_when_that_is_applied(rows, bias, dtype):
    x, w = 300 * randn(rows, 512, dtype=dtype), 0.1 * randn(64, 512, dtype=dtype, seed=1)
    b = randn(64, dtype=dtype, seed=2) if bias else None
    squares = x.float().square().unflatten(1, (-1, 2)).sum(2)
    expected = [norm_linear_reference(x.float(), 1e-6, w.float(), None if b is None else b.float(), s) for s in (0, 1)]
    y, norm = norm_linear(x, squares, 1e-6, w, b)
    ours = DEVICE == "cuda" and rows <= 64 and not bias and dtype != torch.float32
    assert (norm is None) == (ours or bias or dtype == torch.float16)  # of large rows, whose product it may not hold
    assert_close(y if norm is None else norm.apply(y).to(dtype), expected[0])
    y, norm = norm_linear(x, squares, 1e-6, w, b, True)
    assert norm is None
    assert_close(y, expected[1])


@pytest.mark.parametrize(
    "rows,n,k,dtype,ours",
    [(64, 4096, 12288, torch.bfloat16, True), (65, 4096, 4096, torch.bfloat16, False),
     (128, 4096, 12288, torch.bfloat16, False), (256, 1024, 3072, torch.bfloat16, True),
     (257, 1024, 3072, torch.bfloat16, False), (256, 1024, 3072, torch.float32, False),
     (256, 1024, 3000, torch.bfloat16, False)],
)  # fmt: skip
def test_narrow_products_are_ours_up_to_256_rows_and_others_up_to_64(rows, n, k, dtype, ours):
    x, w = (SimpleNamespace(is_cuda=True, dtype=dtype, shape=shape) for shape in ((rows, k), (n, k)))
    assert _fits(x, w, None, add=True) == ours
    assert _fits(x, w, None, add=False) == (ours and rows <= 64)


@pytest.mark.parametrize("m", [2, 16, 64, 65, 192, 256])
@pytest.mark.parametrize("n", [64, 1024, 4096, 12288])
@pytest.mark.parametrize("k", [128, 384, 1024, 2048, 3072, 12288])
def test_tiles_and_splits_divide_a_product(m, n, k):
    for silu, add in ((False, True), (False, False), (True, False)):
        tile = few_rows_tile(m, n, k, silu, add, 2, torch.device("cpu"))
        assert k % (tile.splits * _BLOCK_K) == n % tile.columns == tile.ahead % _BLOCK_K == 0
        assert tile.ahead <= k // tile.splits


@pytest.mark.parametrize("properties", [{"shared_memory_per_block_optin": 101376}, {}], ids=["", "torch 2.6"])
def test_tiles_fit_the_shared_memory_also_where_torch_does_not_tell_it(properties, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    shared_memory.cache_clear()
    cases = [(m, n, k, s) for m in (4, 16, 64) for n in (1024, 4096) for k in (2048, 12288) for s in (False, True)]
    cases.append((256, 1024, 2048, False))
    tiles = [few_rows_tile(m, n, k, silu, not silu, 2, torch.device("cuda")) for m, n, k, silu in cases]
    shared_memory.cache_clear()
    sizes = [2 * _BLOCK_K * (t.rows + t.columns * (1 + silu)) * t.stages for t, (*_, silu) in zip(tiles, cases)]
    assert max(sizes) <= 101376
    assert {t.stages for t in tiles if t.rows == 16} == {3, 4, 7}
    assert {t.stages for t in tiles if t.rows == 64} == {3, 4}
    assert tiles[-1].stages == 3


@pytest.mark.parametrize("rows", [16, 130])
def test_sums_are_in_a_fixed_order(rows):
    k = 4096 if rows <= 16 else 2048  # shared by several programs
    x, w, residual = randn(rows, k), randn(64, k, seed=1), randn(rows, 64, seed=2)
    results = [residual.clone() for _ in range(20 if DEVICE == "cuda" else 3)]
    squares = [linear_add_triton(x, w, result) for result in results]
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(square, squares[0]) for square in squares)
