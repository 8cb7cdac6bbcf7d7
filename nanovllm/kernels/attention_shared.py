"""Decode attention over a prefix that all sequences of a batch share: its K/V are read once for many sequences.

The result is partial: `paged_decode` merges it with each sequence's own keys by log-sum-exp. Invariant: the shared
blocks are the same in every table of the batch, so the table of the first stands for all.
"""

import math

import torch
from torch import Tensor

from nanovllm.kernels._attention import attend, load_keys
from nanovllm.kernels._triton import dot, next_power_of_2, pdl, tl, triton, wait_for_inputs

_BLOCK_M, _BLOCK_N = 128, 64


@triton.jit(do_not_specialize=["batch", "splits"])
def _shared_prefix_kernel(
    q, k_cache, v_cache, tables, rows, shared_len, partial, partial_lse, batch, scale_log2, q_stride, table_stride,
    splits,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile, split): BLOCK_M // G batch entries with all heads of the group against the keys of a
    split. The block table is that of the first entry; an empty split writes a log-sum-exp of -inf and no values."""
    ENTRIES: tl.constexpr = BLOCK_M // G
    hk = tl.program_id(0)
    split = tl.program_id(2)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    b = (tl.program_id(1) * ENTRIES + r // G).to(tl.int64)
    row_mask = (b < batch) & (r < ENTRIES * G)
    mask = row_mask[:, None] & (d < D)[None, :]
    head = hk * G + r % G
    part = (b * HK * G + head) * splits + split
    wait_for_inputs(PDL)
    n = tl.load(shared_len)
    per_split = tl.cdiv(tl.cdiv(n, BLOCK_N), splits) * BLOCK_N
    start = split * per_split
    if start >= n:
        tl.store(partial_lse + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_mask)
        return
    end = tl.minimum(start + per_split, n)
    table = tables + tl.load(rows).to(tl.int64) * table_stride
    qt = tl.load(q + (b * q_stride + head * D)[:, None] + d[None, :], mask=mask, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(start, end, BLOCK_N):
        valid = first + tl.arange(0, BLOCK_N) < end
        k, v = load_keys(k_cache, v_cache, table, first, end, hk, HK, D, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        s = dot(qt, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        s = tl.where(valid[None, :], s * scale_log2, float("-inf"))
        m, total, acc = attend(s, v, m, total, acc, 1.0)  # s is scaled already
    tl.store(partial + part[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
    tl.store(partial_lse + part, m + tl.log2(total), mask=row_mask)


def shared_prefix_splits(batch: int, heads: int, kv_heads: int, num_sms: int) -> int:
    """Programs that share the prefix for one tile of queries: about two programs a multiprocessor in all."""
    group = heads // kv_heads
    tiles = -(-batch // max(_BLOCK_M // group, 1)) * kv_heads
    return min(next_power_of_2(max(2 * num_sms // tiles, 1)), 16)


def shared_prefix_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, shared_len: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Partial attention of q [B, Hq, D] to the first shared_len [1] int32 (>= 1) keys of the sequence in rows[0].

    Returns values [B, Hq, splits, D] and log2-sum-exp2 [B, Hq, splits], fp32; values of empty splits (-inf) are not
    written. k_cache, v_cache, block_tables, rows: as for `paged_decode`.
    """
    (batch, heads, dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 8
    splits = shared_prefix_splits(batch, heads, kv_heads, num_sms)
    partial = torch.empty(batch, heads, splits, dim, device=q.device)
    lse = torch.empty(batch, heads, splits, device=q.device)
    group = heads // kv_heads
    wide = next_power_of_2(dim) * q.element_size() > 256  # fp32, or heads over 128: smaller tiles fit
    block_m, block_n = max(32 if wide else _BLOCK_M, next_power_of_2(group)), 32 if wide else _BLOCK_N
    _shared_prefix_kernel[(kv_heads, -(-batch // (block_m // group)), splits)](
        q, k_cache, v_cache, block_tables, rows, shared_len, partial, lse, batch, scale * math.log2(math.e),
        q.stride(0), block_tables.stride(0), splits, HK=kv_heads, G=group, D=dim, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(16, next_power_of_2(dim)), num_warps=4 if wide else 8,
        num_stages=1 if wide else 3, **pdl(q.device),
    )  # fmt: skip
    return partial, lse
