"""Prefill attention over the paged cache: sequences of any length, causal, behind a cached prefix or earlier chunks.

A program has a tile of queries and walks over the keys with a running softmax. Invariant: the query at position p sees
keys 0 to p of its sequence, whether this step, an earlier chunk or another sequence has stored them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._attention import attend, load_keys
from nanovllm.kernels._triton import LARGE_PREFILL, TensorDescriptor, by_device, dot, next_power_of_2, tl, triton


def paged_prefill_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor,
    context_lens: Tensor, max_seqlen_q: int, scale: float,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's newest tokens to all its tokens, whose K/V are in the cache -> [N, Hq, D].

    q [N, Hq, D] (may be strided along N): sequence b has q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] (int32 [B + 1]), the
    last of its context_lens[b] tokens (int32 [B]); max_seqlen_q: the most query tokens of a sequence, or more.
    k_cache, v_cache, block_tables, rows: as for paged_decode.
    """
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
    q, k_cache, v_cache, k_tiles, v_tiles, out, tables, rows, cu_seqlens, lens, scale_log2, q_stride, table_stride,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (kv head, sequence, tile): BLOCK_M // G query tokens with all G heads of the group, which share K and V.
    Late tiles, which have the most keys, start first. TMA: k_tiles and v_tiles are descriptors of the caches as
    [slots, HK * D]; they serve for whole tiles of keys. Where the keys end within a tile, loads are masked: what lies
    behind may be NaN."""
    TOKENS: tl.constexpr = BLOCK_M // G
    hk = tl.program_id(0)
    b = tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS
    q0 = tl.load(cu_seqlens + b)
    length = tl.load(cu_seqlens + b + 1) - q0
    n = tl.load(lens + b)
    table = tables + tl.load(rows + b).to(tl.int64) * table_stride
    if first >= length:
        return
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = r // G
    row_mask = ((token < length - first) & (r < TOKENS * G))[:, None] & (d < D)[None, :]
    head = (hk * G + r % G) * D
    src = q + (q0 + first).to(tl.int64) * q_stride + (token * q_stride + head)[:, None] + d[None, :]
    qt = tl.load(src, mask=row_mask, other=0.0)
    position = n - length + first + token
    end = tl.minimum(n, n - length + first + TOKENS)
    full = (n - length + first + 1) // BLOCK_N * BLOCK_N  # every row sees every key before
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = tl.minimum(tl.cdiv(end, BLOCK_N), n // BLOCK_N) * BLOCK_N
    for TAIL in tl.static_range(2):
        # the tail is one tile at most: a pipeline there would only take registers from the other loop
        for start in tl.range(whole if TAIL else 0, end if TAIL else whole, BLOCK_N, num_stages=1 if TAIL else None):
            keys = start + tl.arange(0, BLOCK_N)
            if TMA and not TAIL:
                slot = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
                k = k_tiles.load([slot, hk * D])
                v = v_tiles.load([slot, hk * D])
            else:
                k, v = load_keys(k_cache, v_cache, table, start, n, hk, HK, D, BLOCK_SIZE, BLOCK_N, BLOCK_D)
            s = dot(qt, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if start >= full:
                s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
            m, total, acc = attend(s, v, m, total, acc, scale_log2)
    acc = acc / total[:, None]
    dst = out + (q0 + first).to(tl.int64) * (HK * G * D) + (token * (HK * G * D) + head)[:, None] + d[None, :]
    tl.store(dst, acc.to(out.dtype.element_ty), mask=row_mask)


class PrefillConfig(NamedTuple):
    rows: int  # query rows a tile: tokens times heads of a group
    keys: int  # keys a tile
    warps: int
    stages: int
    tma: bool = False  # needs a power-of-two head dim and whole tiles in a block
    registers: int | None = None  # at most, a thread: 128 lets two programs of 8 warps share a multiprocessor


def prefill_config(dim: int, itemsize: int, capability: tuple[int, int], block_size: int, tokens: int) -> PrefillConfig:
    if itemsize == 4:
        return PrefillConfig(32, 16, 8, 1)
    if capability[0] not in (9, 10):
        return PrefillConfig(128, 64, 8, 2) if dim <= 128 else PrefillConfig(64, 32, 8, 2)
    registers = 128 if dim <= 128 else None
    # building the descriptors costs the host 50 us a launch
    if tokens >= LARGE_PREFILL and block_size % 64 == 0 and dim == next_power_of_2(dim):
        return PrefillConfig(128, 64, 8, 2, tma=TensorDescriptor is not None, registers=registers)
    return PrefillConfig(128, 64, 8, 3 if dim <= 128 else 2, registers=registers)


def paged_prefill_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor,
    context_lens: Tensor, max_seqlen_q: int, scale: float, config: PrefillConfig | None = None,
) -> Tensor:  # fmt: skip
    (total, heads, dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    group = heads // kv_heads
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    if config is None:
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
        config = prefill_config(dim, q.element_size(), capability, block_size, total)
    block_m = max(config.rows, next_power_of_2(group))
    tiles: list[Any] = [k_cache, v_cache]
    if config.tma:
        tiles = [TensorDescriptor.from_tensor(c.view(-1, kv_heads * dim), [config.keys, dim]) for c in tiles]
    _prefill_kernel[(kv_heads, rows.shape[0], -(-max_seqlen_q // (block_m // group)))](
        q, k_cache, v_cache, *tiles, out, block_tables, rows, cu_seqlens_q, context_lens,
        scale * math.log2(math.e), q.stride(0), block_tables.stride(0), HK=kv_heads, G=group, D=dim,
        BLOCK_SIZE=block_size, TMA=config.tma, BLOCK_M=block_m, BLOCK_N=config.keys,
        BLOCK_D=max(16, next_power_of_2(dim)),
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    return out


paged_prefill = by_device(paged_prefill_triton, paged_prefill_reference)
