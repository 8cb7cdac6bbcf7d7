"""Top-k, top-p and min-p without a sort: an exact search for the least logit that stays, then one pass that cuts.

All three keep a beginning of the order (larger logit first, lower id first among equals), so a row's result is a
threshold and the number of logits equal to it that stay. Where few can stay, they are collected and searched instead of
the whole row, which is then read three times: for maxima, to collect, to cut. Invariant: at least the best logit stays.
"""

import math

import torch
from torch import Tensor

from nanovllm.kernels._triton import fast_log2, pdl, tl, triton, wait_for_inputs

_LOG2E = tl.constexpr(math.log2(math.e))
# Low bits that are 0 in the fp32 image of a type: its values are so much farther apart.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_LANES, _WARPS, _TILES = 512, 16, 16  # of a program; 8 logits a lane are a tile, and so many may be collected
_SLOTS = tl.constexpr(_TILES)
SCRATCH_ROW = _TILES * _LANES * 8  # logits that a row may collect


def truncate_reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, margins: Tensor) -> None:
    vocab, t = logits.shape[1], temperatures[:, None]
    k = top_k.where(top_k > 0, vocab).clamp(max=vocab)[:, None].long()
    x = logits.float().topk(int(k.max()) if len(k) else 0).values  # the order among equals does not matter here
    mass = ((x.double() - x[:, :1]) / t).exp()
    kept = (torch.arange(x.shape[1], device=x.device) < k) & (x >= x[:, :1] + margins[:, None])
    mass = mass.where(kept, 0.0).cumsum(1)
    target = (top_p * mass[:, -1].float()).where(top_p < 1, math.inf)[:, None]
    n = torch.minimum((kept & (mass < target)).sum(1, keepdim=True) + 1, kept.sum(1, keepdim=True)).clamp(min=1)
    least = x.gather(1, n - 1)
    equal = logits == least
    stays = (logits > least) | (equal & (equal.cumsum(1) <= n - (x > least).sum(1, keepdim=True)))
    logits.masked_fill_(~stays & (t > 0) & x[:, :1].isfinite(), -math.inf)


@triton.jit
def _unit(x, SHIFT: tl.constexpr):
    """fp32 whose low SHIFT bits are 0 -> int64 in the same order, next to each other for neighbours."""
    bits = x.to(tl.int32, bitcast=True) >> SHIFT
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))).to(tl.int64)


@triton.jit
def _value(unit, SHIFT: tl.constexpr):
    bits = unit.to(tl.int32)
    bits = bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))
    return (bits << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _tile(row, start, vocab, LANES: tl.constexpr):
    """fp32 [LANES, 8] of the row from `start` on: 8 neighbours a thread, so that sums over them stay in it."""
    cols = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.load(row + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _collect(row, vocab, scratch, bound, threshold, top, scale, LANES: tl.constexpr):
    """Copy the groups of 8 neighbours with a logit that reaches `bound` to `scratch`, a lane's i-th into tile i.

    Returns (tiles used, more than _SLOTS if they do not fit; weight from `bound` on; weight from `threshold` on).
    """
    place = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    count = tl.zeros([LANES], tl.int32)
    inside = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    last = (vocab - 1) // (LANES * 8) * (LANES * 8)
    for start in tl.range(0, vocab, LANES * 8, num_stages=3):
        x = _tile(row, last - start, vocab, LANES)  # backwards: the end is still in the cache
        w = tl.exp2((x - top) * scale)
        inside += tl.sum(tl.where(x >= bound, w, 0.0), 1)
        total += tl.sum(tl.where(x >= threshold, w, 0.0), 1)
        found = tl.max(x, 1) >= bound
        at = scratch + count[:, None] * (LANES * 8) + place
        tl.store(at, x.to(scratch.dtype.element_ty), mask=(found & (count < _SLOTS))[:, None])
        count += found.to(tl.int32)
    used = tl.max(count, 0)
    for i in range(tl.minimum(used, _SLOTS)):
        tl.store(scratch + i * (LANES * 8) + place, float("-inf"), mask=(count <= i)[:, None])
    tl.debug_barrier()
    return used, tl.sum(inside, 0), tl.sum(total, 0)


@triton.jit
def _search(row, vocab, lo, hi, above, target, top, scale, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """The largest unit whose logits at or above weigh at least `target`, a logit weighing 2^((logit - top) * scale).

    `lo` is taken to weigh enough, `hi` weighs `above`: not enough. Each pass tries three units between. Sums are taken
    in one order, so weights never grow with the unit in spite of rounding. Returns (lo, weight of what is above it,
    whether it ended early: then exactly one logit lies between lo and the returned weight's unit).
    """
    w_lo = float("inf")
    alone = hi < lo  # false
    while (hi - lo > 1) & (alone == 0):
        u2 = lo + ((hi - lo) >> 1)
        if (lo < 0) & (hi > 0) & (_value(lo, SHIFT) > -1e4):  # most units between are of values next to 0
            u2 = _unit((_value(lo, SHIFT) + _value(hi, SHIFT)) / 2, SHIFT)
        u1 = (lo + u2) >> 1
        u3 = (u2 + hi) >> 1
        v1 = _value(u1, SHIFT)
        v2 = _value(u2, SHIFT)
        v3 = _value(u3, SHIFT)
        w1 = tl.zeros([LANES], tl.float32)
        w2 = tl.zeros([LANES], tl.float32)
        w3 = tl.zeros([LANES], tl.float32)
        for start in tl.range(0, vocab, LANES * 8, num_stages=3):
            x = _tile(row, start, vocab, LANES)
            w = tl.exp2((x - top) * scale)
            w1 += tl.sum(tl.where(x >= v1, w, 0.0), 1)
            w2 += tl.sum(tl.where(x >= v2, w, 0.0), 1)
            w3 += tl.sum(tl.where(x >= v3, w, 0.0), 1)
        s1 = tl.sum(w1, 0)
        s2 = tl.sum(w2, 0)
        s3 = tl.sum(w3, 0)
        # of any sums, also NaN, the interval gets smaller
        w_lo = tl.where(s3 >= target, s3, tl.where(s2 >= target, s2, tl.where(s1 >= target, s1, w_lo)))
        above = tl.where(s3 >= target, above, tl.where(s2 >= target, s3, tl.where(s1 >= target, s2, s1)))
        lo = tl.where(s3 >= target, u3, tl.where(s2 >= target, u2, tl.where(s1 >= target, u1, lo)))
        hi = tl.where(s3 >= target, hi, tl.where(s2 >= target, u3, tl.where(s1 >= target, u2, u1)))
        least = tl.exp2((_value(lo, SHIFT) - top) * scale)
        # less than two of the least between them, and far more than rounding: only one logit
        alone = (hi - lo > 1) & (w_lo - above < 1.5 * least) & (least > 1e-5 * w_lo)
    return lo, above, alone


@triton.jit
def _cut(row, vocab, threshold, ties, LANES: tl.constexpr):
    """Keep logits above `threshold` and the first `ties` of those equal to it; the others become -inf."""
    seen = 0.0
    for start in tl.range(0, vocab, LANES * 8, num_stages=3):
        cols = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = _tile(row, start, vocab, LANES)
        equal = tl.where(x == threshold, 1.0, 0.0)
        of_lane = tl.sum(equal, 1)
        n = tl.sum(of_lane, 0)
        stays = (x > threshold) | (x == tl.where(seen + n <= ties, threshold, float("inf")))
        if (seen < ties) & (seen + n > ties):
            rank = seen + (tl.cumsum(of_lane, 0) - of_lane)[:, None] + tl.cumsum(equal, 1)
            stays = (x > threshold) | ((x == threshold) & (rank <= ties))
        seen += n
        tl.store(row + cols, tl.where(stays, x, float("-inf")), mask=cols < vocab)


@triton.jit
def _truncate_kernel(
    logits, temperatures, top_k, top_p, margins, scratch, stride, vocab,
    SHIFT: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row). What stays so far: logits above `threshold`, and the first `ties` of those equal to it."""
    pid = tl.program_id(0).to(tl.int64)
    row = logits + pid * stride
    scratch += pid * (LANES * 8 * _SLOTS)
    wait_for_inputs(PDL)
    t = tl.load(temperatures + pid)
    k = tl.load(top_k + pid)
    p = tl.load(top_p + pid)
    margin = tl.load(margins + pid)
    has_k = (k > 0) & (k < vocab)
    has_p = p < 1
    if (t <= 0) | ((has_k | has_p | (margin > float("-inf"))) == 0):
        return
    best = tl.full([LANES, 8], float("-inf"), tl.float32)
    for start in tl.range(0, vocab, LANES * 8, num_stages=3):
        best = tl.maximum(best, _tile(row, start, vocab, LANES))
    top = tl.max(tl.max(best, 1), 0)
    if tl.abs(top) == float("inf"):
        return
    scale = _LOG2E / t
    threshold = top + margin
    ties = vocab * 1.0
    total = 0.0  # weight of what stays
    # all that can stay is among the n logits of `source`, from `lower` on; from `upper` on they weigh `w_upper`
    source = row
    n = vocab
    lower = _unit(top * 0 + float("-inf"), SHIFT) + 1  # the least finite one
    upper = _unit(top, SHIFT) + 1
    w_upper = 0.0
    wanted = tl.where(has_k, k, LANES)
    if (has_k | has_p) & (wanted <= LANES * 4):
        # from the wanted-th largest of the maxima on, roughly, there are at least as many logits, and few more
        bound = tl.maximum(_unit(tl.min(tl.min(best, 1), 0), SHIFT), lower)
        hi = upper
        for _ in range(12):
            mid = (bound + hi) >> 1
            enough = tl.sum(tl.sum((best >= _value(mid, SHIFT)).to(tl.int32), 1), 0) >= wanted
            hi = tl.where(enough, hi, mid)
            bound = tl.where(enough, mid, bound)
        used, inside, total = _collect(row, vocab, scratch, _value(bound, SHIFT), threshold, top, scale, LANES)
        if has_k | (inside >= p * total):
            lower = bound
            if used <= _SLOTS:
                source = scratch
                n = used * (LANES * 8)
        else:
            upper = bound
            w_upper = inside
    if has_k:
        unit, above, alone = _search(source, n, lower, upper, w_upper, k.to(tl.float32), top, 0.0, SHIFT, LANES)
        cut = _value(unit, SHIFT)
        if cut >= threshold:
            ties = tl.where(alone, vocab * 1.0, k - above)
            threshold = cut
    if has_p:
        if has_k:
            mass = tl.zeros([LANES], tl.float32)
            equal = tl.zeros([LANES], tl.float32)
            for start in tl.range(0, n, LANES * 8, num_stages=3):
                x = _tile(source, start, n, LANES)
                mass += tl.sum(tl.where(x > threshold, tl.exp2((x - top) * scale), 0.0), 1)
                equal += tl.sum(tl.where(x == threshold, 1.0, 0.0), 1)
            total = tl.sum(mass, 0) + tl.minimum(tl.sum(equal, 0), ties) * tl.exp2((threshold - top) * scale)
        target = p * total
        # all logits below this weigh less than 1 - p together
        least = top + (fast_log2(1.0 - p) - fast_log2(vocab * 1.0)) / scale
        # one less: sums of another order than those so far may miss the target by rounding
        lower = tl.maximum(_unit(tl.maximum(least, threshold), SHIFT), lower) - 1
        unit, above, alone = _search(source, n, lower, upper, w_upper, target, top, scale, SHIFT, LANES)
        cut = _value(unit, SHIFT)
        if cut >= threshold:
            ties = tl.ceil((target - above) / tl.exp2((cut - top) * scale))
            ties = tl.where(alone, vocab * 1.0, tl.maximum(ties, 1.0))  # p may be 0 in fp32
            threshold = cut
    _cut(row, vocab, threshold, ties, LANES)


def truncate_triton(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, margins: Tensor,
    config: tuple[int, int] = (_LANES, _WARPS),
) -> None:  # fmt: skip
    batch, vocab = logits.shape
    lanes, warps = config
    scratch = logits.new_empty(batch, _TILES, lanes, 8)
    _truncate_kernel[(batch,)](
        logits, temperatures, top_k, top_p, margins, scratch, logits.stride(0), vocab,
        SHIFT=_SHIFTS[logits.dtype], LANES=lanes, num_warps=warps, **pdl(logits.device),
        maxnreg=64,  # two programs of 16 warps on a multiprocessor
    )  # fmt: skip


def truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to -inf, in place, the logits [B, V] that top_k, top_p and min_p rule out.

    temperatures [B] fp32; top_k [B] int32, at most 0: off; top_p [B] fp32, 1: off; min_p [B] fp32, 0: off.
    min_p keeps tokens of at least min_p times the largest probability, top_k the k most probable, then top_p the
    fewest whose share of the probability that is left reaches p. Lower ids win among equals, except for min_p, which
    treats them alike. Rows of temperature 0, or whose best logit is infinite, stay as they are. Weights are summed in
    fp32.
    """
    f = truncate_triton if logits.is_cuda else truncate_reference
    f(logits, temperatures, top_k, top_p, temperatures * min_p.log())
