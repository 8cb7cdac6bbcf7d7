"""What the attention kernels share: a tile of the paged cache, and one step of the softmax over tiles."""

from nanovllm.kernels._triton import cache_slots, dot, tl, triton


@triton.jit
def load_keys(
    k_cache, v_cache, table, start, end, head,
    HK: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """K and V [BLOCK_N, BLOCK_D] of a key head for a sequence's keys from start on; zeros from end on."""
    d = tl.arange(0, BLOCK_D)
    offs = (cache_slots(table, start, end, BLOCK_SIZE, BLOCK_N) * HK + head)[:, None] * D + d[None, :]
    mask = (start + tl.arange(0, BLOCK_N) < end)[:, None] & (d < D)[None, :]
    return tl.load(k_cache + offs, mask=mask, other=0.0), tl.load(v_cache + offs, mask=mask, other=0.0)


@triton.jit
def attend(s, v, m, total, acc, scale_log2):
    """Online softmax: (m, total, acc), the maximum in log2, the sum and the weighted values of the keys so far, after
    keys with scores s [M, N] and values v [N, D]."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    return m_new, total * alpha + tl.sum(p, 1), dot(p.to(v.dtype), v, acc * alpha[:, None])
