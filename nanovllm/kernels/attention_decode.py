"""Decode attention over the paged cache: one query token a sequence, grouped heads, keys split over programs.

Of few sequences it takes qkv as it comes from the product: norm, rotation and store of the new key need no launch then,
and the first of the old keys are read while the product still runs. Many sequences have their programs run in turns,
each of which would wait for its own query: a launch before is cheaper.

A long sequence among few would leave most of the GPU idle, so several programs share its keys, and the last one to
arrive combines their results. Heads that share a key head are rows of one tile: K and V are read once for all of them.
Invariant: the launch depends on shapes alone and lengths are read on the device, so that it can be captured.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._attention import attend, load_keys
from nanovllm.kernels._triton import arrival_counters, by_device, dot, next_power_of_2, pdl, tl, triton, wait_for_inputs
from nanovllm.kernels.rope import norm_rope_store_reference

_MAX_SPLITS = 32
MOST_ROTATED = 64  # sequences of which qkv is taken


class Rotation(NamedTuple):
    """What is still to be done with qkv [B, (Hq + 2 Hkv) D]; as for `norm_rope_store`."""

    q_weight: Tensor
    k_weight: Tensor
    cos_sin: Tensor
    eps: float


def paged_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, context_lens: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of one query token a sequence to all its keys -> [B, Hq, D].

    q [B, Hq, D] (may be strided along B); k_cache, v_cache [blocks, block_size, Hkv, D]; block_tables
    [S, max_blocks] int32, of which batch entry b has row rows[b], int32; context_lens [B] int32, keys of each,
    0: the output row is zero. Fit for CUDA graphs after one call outside (it allocates the counters); launches on one
    device must not overlap.
    """
    (batch, heads, dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    longest = max(int(context_lens.max()), 1) if batch else 1
    tables = block_tables[rows.long(), : -(-longest // block_size)].long().clamp(min=0)
    mask = torch.arange(tables.shape[1] * block_size, device=q.device) < context_lens[:, None]
    k, v = (c[tables].flatten(1, 2).masked_fill(~mask[:, :, None, None], 0).transpose(1, 2) for c in (k_cache, v_cache))
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)  # the group as query length: K and V are read once
    o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None], scale=scale).reshape(q.shape)
    return o.masked_fill((context_lens == 0)[:, None, None], 0)


def rotated_decode_reference(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, context_lens: Tensor,
    scale: float, rotation: Rotation,
) -> Tensor:  # fmt: skip
    """As `paged_decode_reference`, of qkv; stores K and V of each sequence's last token."""
    last, block_size = context_lens - 1, k_cache.shape[1]
    blocks = block_tables[rows.long(), last.clamp(min=0) // block_size]
    slots = torch.where(last < 0, -1, blocks * block_size + last % block_size)
    q = norm_rope_store_reference(qkv, *rotation[:3], last, slots, k_cache, v_cache, rotation.eps)
    return paged_decode_reference(q, k_cache, v_cache, block_tables, rows, context_lens, scale)


@triton.jit
def _combine(
    out, partial, partial_lse, head, splits, active,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The outputs of G heads from `head` on: partial results of `active` splits, weighted by their log-sum-exp."""
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_S)[None, :]
    for first in tl.static_range(0, G, BLOCK_G):
        j = first + tl.arange(0, BLOCK_G)
        part = (head + j)[:, None] * splits + i
        here = (j < G)[:, None] & (i < active)
        lse = tl.load(partial_lse + part, mask=here, other=float("-inf"), cache_modifier=".cg")
        a = tl.load(
            partial + part[:, :, None] * D + d[None, None, :], mask=here[:, :, None] & (d < D)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        w = tl.exp2(lse - tl.maximum(tl.max(lse, 1), -1e30)[:, None])
        o = tl.sum(a * w[:, :, None], 1) / tl.maximum(tl.sum(w, 1), 1e-30)[:, None]
        dst = out + (head + j)[:, None] * D + d[None, :]
        tl.store(dst, o.to(out.dtype.element_ty), mask=(j < G)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["splits", "shared_splits"])
def _decode_kernel(
    q, k_cache, v_cache, tables, rows, lens, out, partial, partial_lse, counters, shared_len, shared, shared_lse,
    scale_log2, q_stride, table_stride, splits, shared_splits, q_weight, k_weight, cos_sin, eps,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr, SHARED: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (kv head, split, batch entry). How the keys are split depends on the length on the device, the grid does
    not. Of several splits the last to arrive combines all, in order; counters are zero before and after.
    With SHARED (then one split) the first shared_len keys come as partial results in `shared`.
    With ROTATE (then not SHARED) q is qkv as it comes from the product; who has the last keys stores the new one."""
    hk = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head_mask = (g < G)[:, None] & (d < D)[None, :]
    # Lengths, tables and the keys of earlier steps are there: this kernel may start beside products, but not before the
    # attention of the layer before has its own inputs, or in the first layer the embedding.
    n = tl.load(lens + b, cache_modifier=".cg")  # the step before has read the same address
    table = tables + tl.load(rows + b).to(tl.int64) * table_stride
    per_split = tl.maximum(tl.cdiv(tl.cdiv(n, BLOCK_N), splits), 1) * BLOCK_N
    active = tl.maximum(tl.cdiv(n, per_split), 1)
    first_key = tl.minimum(split, active - 1) * per_split
    end = tl.minimum(first_key + per_split, n)
    last = tl.maximum(n - 1, 0)
    if ROTATE:  # row G of the tile of queries is the new key
        half = tl.where(d < D // 2, D // 2, -(D // 2))
        turn = cos_sin + last.to(tl.int64) * D + d % (D // 2)
        cos = tl.load(turn, mask=d < D, other=0.0)[None, :]
        sin = (tl.load(turn + D // 2, mask=d < D, other=0.0) * tl.where(d < D // 2, -1.0, 1.0))[None, :]
        new_mask = (g <= G)[:, None] & (d < D)[None, :]
        weight = tl.where(g < G, q_weight, k_weight)[:, None] + d[None, :]
        w = tl.load(weight, mask=new_mask, other=0.0)
        w_half = tl.load(weight + half[None, :], mask=new_mask, other=0.0)
        slot = tl.load(table + last // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + last % BLOCK_SIZE
        k, v = load_keys(k_cache, v_cache, table, first_key, end, hk, HK, D, BLOCK_SIZE, BLOCK_N, BLOCK_D)
    wait_for_inputs(PDL)
    if split >= active:
        return
    if ROTATE:
        src = q + b * q_stride
        new = src + (tl.where(g < G, hk * G + g, HK * G + hk) * D)[:, None] + d[None, :]
        x = tl.load(new, mask=new_mask, other=0.0)
        x_half = tl.load(new + half[None, :], mask=new_mask, other=0.0)
        v_new = tl.load(src + (HK * G + HK + hk) * D + d, mask=d < D, other=0.0)
        x = x.to(tl.float32)
        x_half = x_half.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * (w.to(tl.float32) * cos) + x_half * (w_half.to(tl.float32) * sin)) * rstd
        qt = x.to(k_cache.dtype.element_ty)
        stored = d < tl.where(split == active - 1, tl.minimum(n, 1) * D, 0)
        to = (slot * HK + hk) * D + d
        tl.store(k_cache + to[None, :] + 0 * g[:, None], qt, mask=(g == G)[:, None] & stored[None, :])
        tl.store(v_cache + to, v_new, mask=stored)
        tl.debug_barrier()  # it is read like the others
    else:
        qt = tl.load(q + b * q_stride + (hk * G + g)[:, None] * D + d[None, :], mask=head_mask, other=0.0)
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # not -inf: padding has no keys
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    head = b * HK * G + hk * G + g
    if SHARED:
        first_key = tl.load(shared_len)
        for shared_split in range(shared_splits):
            shared_part = head * shared_splits + shared_split
            prefix_lse = tl.maximum(tl.load(shared_lse + shared_part, mask=g < G, other=-1e30), -1e30)
            there = head_mask & (prefix_lse > -1e30)[:, None]
            value = tl.load(shared + shared_part[:, None] * D + d[None, :], mask=there, other=0.0)
            m_new = tl.maximum(m, prefix_lse)
            alpha = tl.exp2(m - m_new)
            weight = tl.exp2(prefix_lse - m_new)
            total = total * alpha + weight
            acc = acc * alpha[:, None] + value * weight[:, None]
            m = m_new
    if ROTATE:
        if last < first_key + BLOCK_N:  # the new key is one of the first
            k, v = load_keys(k_cache, v_cache, table, first_key, n, hk, HK, D, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        s = dot(qt, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        s = tl.where((first_key + tl.arange(0, BLOCK_N) < end)[None, :], s, float("-inf"))
        m, total, acc = attend(s, v, m, total, acc, scale_log2)
        first_key += BLOCK_N
    for start in tl.range(first_key, end, BLOCK_N):
        valid = start + tl.arange(0, BLOCK_N) < end
        k, v = load_keys(k_cache, v_cache, table, start, end, hk, HK, D, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        s = dot(qt, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        s = tl.where(valid[None, :], s, float("-inf"))
        m, total, acc = attend(s, v, m, total, acc, scale_log2)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if not SPLIT or active == 1:
        tl.store(out + head[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=head_mask)
    else:
        tl.store(partial + (head * splits + split)[:, None] * D + d[None, :], acc, mask=head_mask)
        tl.store(partial_lse + head * splits + split, m + tl.log2(total), mask=g < G)
        tl.debug_barrier()  # the whole program has stored before its arrival shows
        if tl.atomic_add(counters + b * HK + hk, 1, sem="acq_rel", scope="gpu") == active - 1:
            _combine(out, partial, partial_lse, b * HK * G + hk * G, splits, active, G, D, BLOCK_D, BLOCK_S, BLOCK_G)
            tl.store(counters + b * HK + hk, 0)


def decode_splits(batch: int, num_kv_heads: int, rotate: bool, num_sms: int) -> int:
    """Programs that share a sequence's keys, a power of two up to 32: at most 4 programs a multiprocessor with `rotate`
    and of few sequences, else at most 4 programs each and not more than 8 a multiprocessor. Measured in the step of
    0.6B and 8B and with half of their heads, 1 to 128 rows, lengths equal and ragged."""
    programs = max(batch * num_kv_heads, 1)
    if rotate or programs <= num_sms // 2:
        return min(1 << max(4 * num_sms // programs, 1).bit_length() - 1, _MAX_SPLITS)
    return next_power_of_2(min(max(8 * num_sms // programs, 1), 4))


def decode_config(
    programs: int, splits: int, group: int, dim: int, itemsize: int, rotate: bool, num_sms: int, device: torch.device
) -> tuple[int, int, int]:
    """(keys a tile, warps, stages). The next kernel can only start beside this one where its tiles of K and V leave
    room: they take 8 KB each with few programs and, in groups of up to two heads, with many; else 16 KB, which alone is
    faster. In the step of 0.6B and 8B that is worth 3 to 4 % at one row, in that of 0.6B 1 to 3 % from 160 rows on.
    With `rotate` one tile more is in registers, and a program with few keys of its own needs no deep pipeline."""
    row = next_power_of_2(dim) * itemsize
    small = (
        (splits > 1 or group <= 2) if rotate else programs <= 2 * num_sms or (group <= 2 and programs >= 9 * num_sms)
    )
    keys = min(max((8192 if small or itemsize == 4 else 16384) // row, 16), 64)
    if itemsize == 4:
        return keys, 4, 3
    if keys * row <= 8192:
        return keys, 2, 4 if rotate and splits >= 8 else 5
    deep = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return keys, 2, 4 if deep and not rotate else 3


def paged_decode_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, rows: Tensor, context_lens: Tensor,
    scale: float, num_splits: int | None = None, config: tuple[int, int, int] | None = None,
    prefix: tuple[Tensor, Tensor, Tensor] | None = None, rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """num_splits: programs that share a sequence's keys, by default decode_splits.
    prefix: shared_len [1] int32, a multiple of the block size and at most every context_len but those of padding rows,
    which then get some finite result, and the partial results of `shared_prefix_triton` for so many keys.
    rotation: q is qkv [B, (Hq + 2 Hkv) D], what is to be done with it; not together with `prefix`."""
    (block_size, kv_heads, dim), device, batch, rotate = k_cache.shape[1:], q.device, len(q), rotation is not None
    heads = q.shape[1] // dim - 2 * kv_heads if rotate else q.shape[1]
    counters = arrival_counters(device)
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if q.is_cuda else 8
    if num_splits is None:
        num_splits = decode_splits(batch, kv_heads, rotate, num_sms)
    if batch * kv_heads > len(counters) or prefix:
        num_splits = 1
    group, block_d, programs = heads // kv_heads, max(16, next_power_of_2(dim)), batch * kv_heads * num_splits
    block_n, warps, stages = config or decode_config(
        programs, num_splits, group, dim, q.element_size(), rotate, num_sms, device
    )
    partial = torch.empty((batch * heads * num_splits * (dim + 1),) if num_splits > 1 else (1,), device=device)
    block_s = next_power_of_2(max(num_splits, _MAX_SPLITS))
    _decode_kernel[(kv_heads, num_splits, batch)](
        q, k_cache, v_cache, block_tables, rows, context_lens, out, partial[batch * heads * num_splits :], partial,
        counters, *(prefix or (context_lens, partial, partial)),
        scale * math.log2(math.e), q.stride(0), block_tables.stride(0), num_splits,
        prefix[2].shape[2] if prefix else 0, *(rotation or (q, q, q, 0.0)),
        HK=kv_heads, G=group, D=dim, BLOCK_SIZE=block_size, SPLIT=num_splits > 1,
        BLOCK_M=max(16, next_power_of_2(group + rotate)), BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_S=block_s,
        BLOCK_G=min(next_power_of_2(group), max(8192 // (block_s * block_d), 1)),  # heads combined at once
        SHARED=prefix is not None, ROTATE=rotate, num_warps=warps, num_stages=stages,
        **pdl(device),
    )  # fmt: skip
    return out


paged_decode = by_device(paged_decode_triton, paged_decode_reference)
