"""Storing keys and values in the paged cache, with q/k RMSNorm and rotary embedding in the same pass.

It must not know of blocks: a token's place in the cache is one number. Invariant: a token with slot -1 stores nothing.
"""

import torch
from torch import Tensor

from nanovllm.kernels._triton import LARGE_PREFILL, by_device, next_power_of_2, pdl, tl, triton, wait_for_inputs
from nanovllm.kernels.norm import PendingNorm, pending_args, pending_factor


def norm_rope_store_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor,
    k_cache: Tensor, v_cache: Tensor, eps: float, norm: PendingNorm | None = None,
) -> Tensor:  # fmt: skip
    """RMSNorm over each q and k head, rotary embedding (halves, not pairs), store of k and v; returns q [N, Hq, D].

    qkv [N, (Hq + 2 Hkv) D] (rows may be strided); q_weight, k_weight [D]; cos_sin [max_pos, D] fp32, cos in the first
    half; positions [N] int32; slot_mapping [N] int32, -1: not stored; k_cache, v_cache [blocks, block_size, Hkv, D],
    written in place; norm: of the rows before the product that qkv is, if it is still to be applied.
    """
    num_kv_heads, dim = k_cache.shape[2:]
    heads = (norm.apply(qkv) if norm else qkv).unflatten(-1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)

    def norm_rope(x: Tensor, weight: Tensor) -> Tensor:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        x1, x2 = f.chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(qkv.dtype)

    q, k, v = norm_rope(q, q_weight), norm_rope(k, k_weight), v.to(qkv.dtype)
    live = slot_mapping >= 0
    if not bool(live.all()):
        k, v, slot_mapping = k[live], v[live], slot_mapping[live]
    slots = slot_mapping.long()
    k_cache.flatten(0, 1)[slots] = k
    v_cache.flatten(0, 1)[slots] = v
    return q


@triton.jit(do_not_specialize=["parts"])
def _norm_rope_store_kernel(
    qkv, q_out, k_cache, v_cache, q_weight, k_weight, cos_sin, positions, slot_mapping, qkv_stride, eps,
    squares, parts, size, norm_eps, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HB: tl.constexpr, GROUPS: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, part), of GROUPS groups: HB query heads each, then HB key heads, then HB value heads, as i grows.
    No branches, so that all loads are in flight at once: value heads are rotated too, and the result dropped."""
    token = tl.program_id(0).to(tl.int64)
    QB: tl.constexpr = (HQ + HB - 1) // HB
    KB: tl.constexpr = (HK + HB - 1) // HB
    d = tl.arange(0, HALF)
    in_half = d < D // 2
    wait_for_inputs(PDL)
    for group in tl.static_range(GROUPS):
        i = tl.program_id(1) * GROUPS + group
        is_q = i < QB
        is_v = i >= QB + KB
        head = (i - tl.where(is_q, 0, tl.where(is_v, QB + KB, QB))) * HB + tl.arange(0, HB)
        mask = (head < tl.where(is_q, HQ, HK))[:, None] & in_half[None, :]
        offs = head[:, None] * D + d[None, :]
        src = qkv + token * qkv_stride + tl.where(is_q, 0, tl.where(is_v, HQ + HK, HQ)) * D + offs
        x1 = tl.load(src, mask=mask, other=0.0)
        x2 = tl.load(src + D // 2, mask=mask, other=0.0)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        row = cos_sin + tl.load(positions + token).to(tl.int64) * D
        cos = tl.load(row + d, mask=in_half, other=0.0)[None, :]
        sin = tl.load(row + D // 2 + d, mask=in_half, other=0.0)[None, :]
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        if BLOCK_P:
            factor = pending_factor(squares, token, parts, size, norm_eps, BLOCK_P)
            f1 = f1 * factor
            f2 = f2 * factor
        v1 = f1
        v2 = f2
        weight = q_weight if is_q else k_weight
        w1 = tl.load(weight + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + D // 2 + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        rstd = tl.rsqrt((tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)) / D + eps)[:, None]
        f1 = f1 * rstd * w1
        f2 = f2 * rstd * w2
        y1 = tl.where(is_v, v1, f1 * cos - f2 * sin).to(x1.dtype)
        y2 = tl.where(is_v, v2, f2 * cos + f1 * sin).to(x2.dtype)
        q_mask = (head < tl.where(is_q, HQ, 0))[:, None] & in_half[None, :]
        tl.store(q_out + token * (HQ * D) + offs, y1, mask=q_mask)
        tl.store(q_out + token * (HQ * D) + offs + D // 2, y2, mask=q_mask)
        cache = v_cache if is_v else k_cache
        cache_mask = (head < tl.where(is_q, 0, tl.where(slot >= 0, HK, 0)))[:, None] & in_half[None, :]
        tl.store(cache + slot * (HK * D) + offs, y1, mask=cache_mask)
        tl.store(cache + slot * (HK * D) + offs + D // 2, y2, mask=cache_mask)


def norm_rope_store_triton(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor,
    k_cache: Tensor, v_cache: Tensor, eps: float, norm: PendingNorm | None = None,
    config: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """config: (heads a program, warps)."""
    n, (hk, dim) = qkv.shape[0], k_cache.shape[2:]
    hq = qkv.shape[1] // dim - 2 * hk
    q = torch.empty((n, hq, dim), dtype=qkv.dtype, device=qkv.device)
    heads, warps = config or (min(8, next_power_of_2(max(hq, hk))), 4)
    groups = -(-hq // heads) + 2 * -(-hk // heads)
    each = groups if n >= LARGE_PREFILL else 1  # so many small programs would take longer to start than to run
    _norm_rope_store_kernel[(n, groups // each)](
        qkv, q, k_cache, v_cache, q_weight, k_weight, cos_sin, positions, slot_mapping, qkv.stride(0), eps,
        HQ=hq, HK=hk, D=dim, HALF=next_power_of_2(dim // 2), HB=heads, GROUPS=each, num_warps=warps,
        **pending_args(norm, qkv), **pdl(qkv.device),
    )  # fmt: skip
    return q


norm_rope_store = by_device(norm_rope_store_triton, norm_rope_store_reference)
