"""Prefill attention over the paged cache: sequences of any length, causal, behind a cached prefix or earlier chunks."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._triton import cache_slots, dot, next_power_of_2, tl, triton


def paged_prefill_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor,
    context_lens: Tensor, max_seqlen_q: int, scale: float,
) -> Tensor:  # fmt: skip
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    starts, lens = cu_seqlens_q.tolist(), context_lens.tolist()
    for row, lo, hi, n in zip(rows.tolist(), starts[:-1], starts[1:], lens, strict=True):
        table = block_tables[row, : -(-n // block_size)].long()
        k = k_cache[table].flatten(0, 1)[:n].transpose(0, 1)
        v = v_cache[table].flatten(0, 1)[:n].transpose(0, 1)
        length, group = hi - lo, heads // kv_heads
        grouped = q[lo:hi].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        last = torch.arange(n - length, n, device=q.device).repeat(group)
        mask = torch.arange(n, device=q.device) <= last[:, None]
        o = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
        out[lo:hi] = o.unflatten(1, (group, length)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


@triton.jit
def _prefill_kernel(
    q, k_cache, v_cache, out, tables, rows, cu_seqlens, lens, scale_log2, q_stride, table_stride,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Program (kv head, sequence, tile): BLOCK_M // G query tokens with all G heads of the group, which share K and V.
    Late tiles, which have the most keys, start first. TMA: the caches are descriptors of [slots, HK * D]."""
    TOKENS: tl.constexpr = BLOCK_M // G
    hk = tl.program_id(0)
    b = tl.program_id(1)
    q0 = tl.load(cu_seqlens + b)
    length = tl.load(cu_seqlens + b + 1) - q0
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS
    if first >= length:
        return
    n = tl.load(lens + b)
    table = tables + tl.load(rows + b).to(tl.int64) * table_stride
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + r // G
    row_mask = ((token < length) & (r < TOKENS * G))[:, None] & (d < D)[None, :]
    head = (hk * G + r % G) * D
    qt = tl.load(q + ((q0 + token).to(tl.int64) * q_stride + head)[:, None] + d[None, :], mask=row_mask, other=0.0)
    position = n - length + token
    end = tl.minimum(n, n - length + first + TOKENS)
    full = (n - length + first + 1) // BLOCK_N * BLOCK_N  # every row sees every key before
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        for start in tl.range(full if MASKED else 0, end if MASKED else full, BLOCK_N, warp_specialize=WS):
            keys = start + tl.arange(0, BLOCK_N)
            if TMA:
                slot = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
                k = k_cache.load([slot, hk * D])
                v = v_cache.load([slot, hk * D])
                if MASKED and ZERO:
                    v = tl.where((keys < n)[:, None], v, 0.0)
            else:
                offs = (cache_slots(table, start, n, BLOCK_SIZE, BLOCK_N) * HK + hk)[:, None] * D + d[None, :]
                if MASKED or D != BLOCK_D:
                    mask = (keys < n)[:, None] & (d < D)[None, :]
                    k = tl.load(k_cache + offs, mask=mask, other=0.0)
                    v = tl.load(v_cache + offs, mask=mask, other=0.0)
                else:
                    k = tl.load(k_cache + offs)
                    v = tl.load(v_cache + offs)
            s = dot(qt, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if MASKED:
                s = tl.where((keys[None, :] <= position[:, None]) & (keys < n)[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
            m = m_new
    acc = acc / l[:, None]
    dst = out + ((q0 + token).to(tl.int64) * (HK * G * D) + head)[:, None] + d[None, :]
    tl.store(dst, acc.to(out.dtype.element_ty), mask=row_mask)


def prefill_config(
    dim: int, itemsize: int, capability: tuple[int, int], max_tile: int
) -> tuple[int, int, int, int, bool]:
    """(rows a tile, keys a tile, warps, stages, TMA) for a device; max_tile: rows of the longest sequence and group."""
    if itemsize == 4:
        return 32, 32 if dim <= 128 else 16, 4, 1, False
    if capability[0] < 9:
        return 64, 64 if dim <= 128 else 32, 4, 2, False
    return 128, 64, 8, 3, False


def paged_prefill_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor,
    context_lens: Tensor, max_seqlen_q: int, scale: float,
    config: tuple[int, int, int, int, bool] | None = None, ws: bool = False, zero: bool = True,
) -> Tensor:  # fmt: skip
    (total, heads, dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    group = heads // kv_heads
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    block_m, block_n, warps, stages, tma = config or prefill_config(
        dim, q.element_size(), capability, max_seqlen_q * group
    )
    block_m = max(block_m, next_power_of_2(group))
    block_d = max(16, next_power_of_2(dim))
    k, v = k_cache, v_cache
    tma = tma and block_d == dim and block_size % block_n == 0
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides = [k.shape[0] * block_size, kv_heads * dim], [kv_heads * dim, 1]
        k = TensorDescriptor(k, shape, strides, [block_n, dim])
        v = TensorDescriptor(v, shape, strides, [block_n, dim])
    if total:
        _prefill_kernel[(kv_heads, rows.shape[0], -(-max_seqlen_q // (block_m // group)))](
            q, k, v, out, block_tables, rows, cu_seqlens_q, context_lens, scale * math.log2(math.e), q.stride(0),
            block_tables.stride(0), HK=kv_heads, G=group, D=dim, BLOCK_SIZE=block_size, TMA=tma,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, WS=ws, ZERO=zero, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor,
    context_lens: Tensor, max_seqlen_q: int, scale: float,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's newest tokens to all its tokens, whose K/V are in the cache -> [N, Hq, D].

    q [N, Hq, D] (may be strided along N): sequence b has q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] (int32 [B + 1]), the
    last of its context_lens[b] tokens (int32 [B]); max_seqlen_q: the most query tokens of a sequence, or more.
    k_cache, v_cache, block_tables, rows: as for paged_decode.
    """
    f = paged_prefill_triton if q.is_cuda else paged_prefill_reference
    return f(q, k_cache, v_cache, block_tables, rows, cu_seqlens_q, context_lens, max_seqlen_q, scale)
