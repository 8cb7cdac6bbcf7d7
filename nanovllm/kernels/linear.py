"""Linear layers with what comes before or after in one launch where a step has few rows; cuBLAS where it has many.

A product of few rows is bound by reading the weights and by launches. On an H200 the four products of a layer of
Qwen3-0.6B with their norms and activation take 12 us in four launches at one row (cuBLAS 34 us in seven), 20 against 28
at 16 rows. From 65 rows on cuBLAS is used, which wins at 256 rows, with 8B at 128 too, but for narrow products that are
added: those are ours up to 256 rows, because the norm after them needs no launch then (with the rotation of q and k
30.6 us at 128 rows instead of 36.3, 36.1 at 256 instead of 36.4).

The weight of the norm is part of the matrix, so that of the norm itself one factor a row is left, which can be applied
to the result, after cuBLAS by the kernel that reads it. Norm, activation and residual need no launch of their own.
Weights do not depend on the kernel before, so up to 16 rows a program reads its first ones, for one row all, while that
one still runs: 5 to 8 % of a step. More than one row: programs share the K of a product, so that all multiprocessors
read weights. A product that adds to the residual stream also sums its squares, of which the next product takes the
factor. Invariant: partial sums are added in a fixed order.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._triton import (
    arrival_counters,
    dot,
    let_next_start,
    next_power_of_2,
    pdl,
    shared_memory,
    tl,
    triton,
    wait_for_last,
)
from nanovllm.kernels.activation import silu_mul, silu_mul_reference
from nanovllm.kernels.norm import PendingNorm, rms_norm, rms_norm_reference

_MOST_ROWS, _MOST_ROWS_NARROW = 64, 256
_NARROW = 1024  # columns
_BLOCK_N, _BLOCK_K = 32, 128  # a tile of weights; twice as wide where a product has many columns to add


def norm_linear_reference(
    x: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    y = F.linear(rms_norm_reference(x, None, eps), weight, bias)
    return silu_mul_reference(y) if silu else y


def linear_add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, add: bool = True) -> Tensor:
    y = F.linear(x, weight, bias)
    return residual.copy_(y + residual if add else y)


@triton.jit(do_not_specialize=["add"])
def _one_row_kernel(
    x, weight, residual, out, N, eps, add, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs with all of K in registers, which is read while the kernel before still runs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    k_mask = k < K
    mask = (n < N)[:, None] & k_mask[None, :]
    offs = n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(weight + offs, mask=mask, other=0.0)
    if SILU:
        w_up = tl.load(weight + N.to(tl.int64) * K + offs, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_last(PDL)
    if ADD:
        old = tl.load(residual + n, mask=n < N * add, other=0.0).to(tl.float32)
    a = tl.load(x + k, mask=k_mask, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 0) / K + eps)
    y = tl.sum(w.to(tl.float32) * a[None, :], 1) * scale
    if SILU:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(w_up.to(tl.float32) * a[None, :], 1) * scale)
    if ADD:
        y += old
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M", "add", "parts"])
def _few_rows_kernel(
    x, squares, weight, residual, out, squares_out, partial, counters, M, N, K, eps, add, parts, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (columns, split of K, rows). Of several splits the last to arrive adds up all, in order; counters
    are zero before and after. K is a multiple of BLOCK_K * SPLITS, N of BLOCK_N. See `Tile` for AHEAD and EARLY.
    NORM: `parts` sums of squares of each row are in `squares`. ADD: each program leaves one in `squares_out`."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    i_tile = tl.arange(0, BLOCK_M)
    i = tl.program_id(2) * BLOCK_M + i_tile
    j = tl.arange(0, BLOCK_N)
    m = i < M
    n = tile * BLOCK_N + j
    length = tl.multiple_of(K // SPLITS, BLOCK_K)
    k = split * length + tl.arange(0, BLOCK_K)
    a_ptr = x + i[:, None] * K + k[None, :]
    w_ptr = weight + n[:, None].to(tl.int64) * K + k[None, :]
    up = N.to(tl.int64) * K
    if EARLY:
        let_next_start(PDL)
    if AHEAD:
        k_ahead = split * length + tl.arange(0, AHEAD)
        ahead_ptr = weight + n[:, None].to(tl.int64) * K + k_ahead[None, :]
        w_ahead = tl.load(ahead_ptr)
        if SILU:
            up_ahead = tl.load(ahead_ptr + up)
    wait_for_last(PDL)
    if not EARLY:
        let_next_start(PDL)
    if NORM:  # read now and needed at the end
        p = tl.arange(0, BLOCK_P)[None, :]
        square = tl.load(squares + i[:, None] * parts + p, mask=m[:, None] & (p < parts), other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if AHEAD:
        a_ahead = tl.load(x + i[:, None] * K + k_ahead[None, :], mask=m[:, None], other=0.0)
        acc = dot(a_ahead, tl.trans(w_ahead), acc)
        if SILU:
            acc_up = dot(a_ahead, tl.trans(up_ahead), acc_up)
    for start in tl.range(AHEAD, length, BLOCK_K):
        a = tl.load(a_ptr + start, mask=m[:, None], other=0.0)
        acc = dot(a, tl.trans(tl.load(w_ptr + start)), acc)
        if SILU:
            acc_up = dot(a, tl.trans(tl.load(w_ptr + start + up)), acc_up)
    o = i[:, None] * N + n[None, :]
    if ADD:
        old = tl.load(residual + o, mask=m[:, None] & (n < N * add)[None, :], other=0.0)
    ours = True
    if SPLITS > 1:
        block = tl.program_id(2) * tl.num_programs(0) + tile
        part = partial + block.to(tl.int64) * SPLITS * (BLOCK_M * BLOCK_N) + i_tile[:, None] * BLOCK_N + j[None, :]
        tl.store(part + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()  # the whole program has stored before its arrival shows
        ours = tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if ours:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for s in tl.static_range(SPLITS):
                acc += tl.load(part + s * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(counters + block, 0)
    if ours:
        if NORM:
            scale = tl.rsqrt(tl.sum(square, 1) / K + eps)[:, None]
            acc = acc * scale
            acc_up = acc_up * scale
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        if ADD:
            acc += old.to(tl.float32)
        y = acc.to(out.dtype.element_ty)
        tl.store(out + o, y, mask=m[:, None])
        if ADD:
            stored = y.to(tl.float32)
            tl.store(squares_out + i * tl.num_programs(0) + tile, tl.sum(stored * stored, 1), mask=m)


class Tile(NamedTuple):
    """What one program of a product of few rows computes, in steps of _BLOCK_K along K, shared by `splits`.

    ahead: of K, what it reads of the weights while the kernel before still runs. early: the next kernel may start
    meanwhile, or else when that one has ended.
    """

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int
    ahead: int
    early: bool


def few_rows_tile(m: int, n: int, k: int, silu: bool, add: bool, itemsize: int, device: torch.device) -> Tile:
    """Splits: so that programs fill the GPU and none has much more to do. Stages: as many as help and as fit. Found by
    descent along each field, measured in the step of 0.6B at 4, 16, 64, 96 to 256 rows and of 8B at 16, its half too,
    and 64."""
    few = m <= 16
    rows = 16 if few else 64
    wide = m > _MOST_ROWS or (add and n > 2048) or (few and not silu and n > 4096)
    columns = _BLOCK_N * (2 if wide else 1)
    splits, tiles, enough = 1, -(-m // rows) * (n // columns), 128 if m <= _MOST_ROWS else 96
    while not (silu or (few and k <= 2048 and n <= _NARROW)) and (tiles * splits < enough or k > 2048 * splits):
        if k % (2 * splits * _BLOCK_K) or tiles * splits >= 256:
            break
        splits *= 2
    programs, read, length = tiles * splits, columns * (2 if silu else 1), k // splits
    ahead = 0
    if few:
        half = silu and (k <= 2048 or programs > 256)
        ahead = 1 << min((32768 if half else 65536) // (itemsize * read), length).bit_length() - 1
    if silu:
        wanted = 4 if few else 6
    elif m > _MOST_ROWS:
        wanted = 4
    elif programs >= 256:
        wanted = 3  # more programs at once instead
    else:
        wanted = 5 if not few else 7 if add else 4
    stage = itemsize * _BLOCK_K * (rows + read)
    stages = min(wanted, shared_memory(device) // stage, (length - ahead) // _BLOCK_K + 1)
    warps = 8 if (few and programs <= 64) or _MOST_ROWS < m <= 128 else 4
    early = m > _MOST_ROWS or (few and (silu or splits > 1))
    return Tile(rows, columns, splits, warps, stages, ahead, early)


def _one_row(x: Tensor, eps: float | None, weight: Tensor, out: Tensor, silu: bool, add: bool | None) -> None:
    """eps: of the norm before, if there is one; add: whether to add to `out`, `None`: a product that never does."""
    k, n = x.shape[1], out.shape[1]
    block_k = next_power_of_2(k)
    wide = block_k * (2 if silu else 1)
    # few programs would not fill the GPU, many that add wait for one another
    adds, size = add is not None, n * k
    block_n = max((4096 if adds and size <= 1 << 21 else 16384 if adds and size >= 1 << 24 else 8192) // wide, 1)
    warps = 2 if k <= 2048 else 4 if wide <= 8192 else 8
    _one_row_kernel[(-(-n // block_n),)](
        x, weight, out, out, n, eps or 0.0, int(bool(add)), K=k, BLOCK_N=block_n, BLOCK_K=block_k,
        NORM=eps is not None, SILU=silu, ADD=adds, num_warps=warps, **pdl(x.device),
    )  # fmt: skip


def _few_rows(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, out: Tensor, silu: bool, add: bool | None
) -> Tensor:  # fmt: skip
    """As `_one_row`; returns the sums of squares of the parts of each row of `out` [N, parts], if `add` is given."""
    (m, k), n = x.shape, out.shape[1]
    tile = few_rows_tile(m, n, k, silu, add is not None, x.element_size(), x.device)
    across, down = n // tile.columns, -(-m // tile.rows)
    parts = squares.shape[1] if squares is not None else 1
    partial, new_squares = (
        torch.empty(size, dtype=torch.float32, device=x.device)
        for size in ((across * down * tile.splits if tile.splits > 1 else 1, tile.rows, tile.columns), (m, across))
    )
    _few_rows_kernel[(across, tile.splits, down)](
        x, x if squares is None else squares, weight, out, out, new_squares, partial, arrival_counters(x.device),
        m, n, k, eps, int(bool(add)), parts, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=_BLOCK_K,
        BLOCK_P=next_power_of_2(parts), SPLITS=tile.splits, AHEAD=tile.ahead, EARLY=tile.early,
        NORM=squares is not None, SILU=silu, ADD=add is not None, num_warps=tile.warps, num_stages=tile.stages,
        **pdl(x.device),
    )  # fmt: skip
    return new_squares


def norm_linear_triton(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, silu: bool = False) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // (2 if silu else 1)), dtype=x.dtype, device=x.device)
    if x.shape[0] == 1:
        _one_row(x, eps, weight, out, silu, None)
        return out
    if squares is None:
        x = rms_norm(x, None, eps)
    elif squares.shape[1] > 64:  # more than a program holds beside its tile
        squares = squares.sum(1, keepdim=True)
    _few_rows(x, squares, eps, weight, out, silu, None)
    return out


def linear_add_triton(x: Tensor, weight: Tensor, residual: Tensor, add: bool = True) -> Tensor | None:
    if x.shape[0] > 1:
        return _few_rows(x, None, 0.0, weight, residual, False, add)
    _one_row(x, None, weight, residual, False, add)
    return None


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, add: bool) -> bool:
    """Whether our kernels can and should do this product."""
    (n, k), rows = weight.shape, x.shape[0]
    most = _MOST_ROWS_NARROW if add and n <= _NARROW else _MOST_ROWS
    fast = x.is_cuda and x.dtype != torch.float32 and bias is None and 0 < rows <= most
    return fast and (k <= 16384 if rows == 1 else n % (2 * _BLOCK_N) == 0 and k % _BLOCK_K == 0)


def norm_linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, silu: bool = False
) -> tuple[Tensor, PendingNorm | None]:
    """y = x / rms(x) W^T + b of x [N, K], W [M, K] -> [N, M]; silu: silu(first half of y) * second half, [N, M / 2].

    squares: sums of squares of parts of each row of x, from what has written it; `None` where that does not know.
    A norm beside y has yet to be applied to it; there is none with silu.
    """
    if _fits(x, weight, bias, False):
        return norm_linear_triton(x, squares, eps, weight, silu), None
    if squares is None or bias is not None or x.dtype == torch.float16:  # whose range may be too small without the norm
        y, norm = F.linear(rms_norm(x, None, eps), weight, bias), None
    else:
        y, norm = F.linear(x, weight), PendingNorm(squares, x.shape[1], eps)
    return (silu_mul(y, norm), None) if silu else (y, norm)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, add: bool = True) -> Tensor | None:
    """residual [N, M] += x [N, K] W^T + b in place; with add=False it is overwritten.

    Returns the sums of squares of parts of each row of `residual` [N, parts], fp32, where the kernel has them.
    """
    if _fits(x, weight, bias, True):
        return linear_add_triton(x, weight, residual, add)
    if bias is not None:
        residual = residual.add_(bias) if add else residual.copy_(bias.expand_as(residual))
    residual.addmm_(x, weight.t(), beta=int(add or bias is not None))
    return None
