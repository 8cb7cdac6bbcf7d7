"""Gumbel-max sampling: the token with the largest logit / T + noise, the noise a hash of (seed, position, token id).

With Gumbel noise that token is a sample of the softmax (Gumbel, 1954), so there is no sum, no sort and no state of a
generator. Invariant: the noise depends on these three numbers alone, so a request draws the same whatever else runs,
after a preemption and with any number of ranks.
"""

import math

import torch
from torch import Tensor

from nanovllm.kernels._triton import (
    arrival_counters,
    by_device,
    fast_log2,
    next_power_of_2,
    pdl,
    tl,
    triton,
    wait_for_inputs,
)
from nanovllm.kernels.all_reduce import Words, receive_words, send_words

_M32 = 0xFFFFFFFF
_LOG2E = tl.constexpr(math.log2(math.e))


def _mix(x: Tensor) -> Tensor:
    """A good 32-bit mixer (constants of lowbias32), in int64."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _M32
    x = (x ^ (x >> 15)) * 0x846CA68B & _M32
    return x ^ (x >> 16)


def gumbel_reference(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Noise of token ids [V] for rows with seeds, positions [B] -> [B, V] fp32."""
    key0 = _mix(seeds + _mix((seeds >> 32) + _mix(positions.long() + 0x9E3779B1 & _M32) & _M32) & _M32)
    key1 = _mix(key0 + 0x85EBCA6B & _M32)
    x = ids * 0x9E3779B1 + key0[:, None] & _M32
    x = (x ^ (x >> 16)) * 0x7FEB352D + key1[:, None] & _M32
    x = (x ^ (x >> 15)) * 0x846CA68B & _M32
    u = (x.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def sample_with_scores_reference(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor | None = None,
    last_tokens: Tensor | None = None, out: Tensor | None = None, vocab_offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As sample, for columns vocab_offset... of the vocabulary: (scores [B] fp32, ids [B] int64, over the vocabulary).

    The shard with the best score (the first of equals) has the token that the whole vocabulary would give.
    """
    ids = torch.arange(vocab_offset, vocab_offset + logits.shape[1], device=logits.device)
    if rows is not None:
        temperatures, seeds = temperatures[rows], seeds[rows]
    t = temperatures[:, None]
    scores = logits.float()
    if bool((t > 0).any()):
        scores = torch.where(t > 0, scores / t.where(t > 0, 1.0) + gumbel_reference(seeds, positions, ids), scores)
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    best = scores.amax(1)
    ids = ids.where(scores == best[:, None], ids[-1]).amin(1)
    if last_tokens is not None:
        last_tokens[rows] = ids
    return best, ids if out is None else out.copy_(ids)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["tiles"])
def _sample_kernel(
    logits, temperatures, seeds, positions, rows, last_tokens, out_scores, out_ids, scores, ids, counters,
    words, turns, deltas, stride, vocab, offset, tiles, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row): the best of `tiles` tiles of BLOCK logits; the last of a row to arrive takes the best of
    its chunks, then of all ranks, and counters are zero before and after. With noise, scores are in units of log2:
    logit / T * log2(e) - log2(-log2(1 - u)) orders tokens as logit / T - log(-log(1 - u)) does."""
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    first = tl.program_id(0) * tiles * BLOCK
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    r = row if rows is None else tl.load(rows + row).to(tl.int64)
    t = tl.load(temperatures + r)
    scale = tl.where(t > 0, _LOG2E / t, 1.0)
    seed = tl.load(seeds + r)
    key = _mix32(tl.load(positions + row).to(tl.uint32) + 0x9E3779B1)
    key0 = _mix32(seed.to(tl.uint32) + _mix32((seed >> 32).to(tl.uint32) + key))
    key1 = _mix32(key0 + 0x85EBCA6B)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lane
    for i in range(tiles):
        cols = first + i * BLOCK + lane
        s = tl.load(logits + row * stride + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32) * scale
        if t > 0:
            x = (cols + offset).to(tl.uint32) * 0x9E3779B1 + key0
            x = (x ^ (x >> 16)) * 0x7FEB352D + key1
            x = (x ^ (x >> 15)) * 0x846CA68B  # the low bits are not mixed further: they hardly count
            u = tl.minimum(x.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
            series = u * (_LOG2E + u * (0.5 * _LOG2E + u * (_LOG2E / 3)))  # the tail that decides: full precision
            s -= fast_log2(tl.where(u < 0.01, series, -fast_log2(1.0 - u)))
        better = s > best  # false for NaN
        best = tl.where(better, s, best)
        best_id = tl.where(better, cols, best_id)
    top = tl.max(best, 0)
    tl.store(scores + row * chunks + tl.program_id(0), top)
    tl.store(ids + row * chunks + tl.program_id(0), tl.min(tl.where(best == top, best_id, 2147483647), 0))
    tl.debug_barrier()  # the whole program has stored before its arrival shows
    if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
        tl.store(counters + row, 0)
        c = tl.arange(0, BLOCK_C)
        all_scores = tl.load(scores + row * chunks + c, mask=c < chunks, other=float("-inf"), cache_modifier=".cg")
        all_ids = tl.load(ids + row * chunks + c, mask=c < chunks, other=2147483647, cache_modifier=".cg")
        top = tl.max(all_scores, 0)
        token_id = tl.min(tl.where(all_scores == top, all_ids, 2147483647), 0) + offset
        if SIZE > 1:
            two = tl.arange(0, 2)
            turn = tl.load(turns + row * 2 + two) + 1
            own = tl.where(two == 0, top.to(tl.int32, bitcast=True), token_id)
            send_words(own, words, deltas, row * 2 + two, two < 2, turn, RANK, SIZE, W)
            for rank in tl.static_range(SIZE):
                pair = own
                if rank != RANK:
                    pair = receive_words(words, rank, row * 2 + two, two < 2, turn, SIZE, W)
                score = tl.sum(tl.where(two == 0, pair, 0), 0).to(tl.float32, bitcast=True)
                its_id = tl.sum(tl.where(two == 1, pair, 0), 0)
                if rank > 0:
                    its_id = tl.where(score > top, its_id, token_id)
                    score = tl.maximum(score, top)
                top = score
                token_id = its_id
            tl.debug_barrier()  # all threads have read the turn
            tl.store(turns + row * 2 + two, turn)
        token_id = token_id.to(tl.int64)
        tl.store(out_ids + row, token_id)
        if last_tokens is not None:
            tl.store(last_tokens + r, token_id)
        tl.store(out_scores + row, tl.where(t > 0, top / _LOG2E + 0.36651292, top))  # + -log(log(2)): back to nats


def sample_with_scores_triton(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor | None = None,
    last_tokens: Tensor | None = None, out: Tensor | None = None, vocab_offset: int = 0,
    config: tuple[int, int, int] | None = None, peers: Words | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """config: (logits a tile, tiles a program, warps), by default at least about 8 programs a multiprocessor, at most 8
    tiles each.
    peers: what other ranks have of the vocabulary counts, too. All ranks call it then, with the same rows; W is
    twice the most there can be, and on a GPU one program of each row must find room at once."""
    (batch, vocab), device = logits.shape, logits.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if logits.is_cuda else 1
    block, tiles, warps = config or (1024, min(max(batch * vocab // (8 * 1024 * num_sms), 1), 8), 4)
    chunks = -(-vocab // (block * tiles))
    scores = torch.empty((batch, chunks), dtype=torch.float32, device=device)
    ids = torch.empty((batch, chunks), dtype=torch.int32, device=device)
    out_scores = torch.empty(batch, dtype=torch.float32, device=device)
    out_ids = torch.empty(batch, dtype=torch.int64, device=device) if out is None else out
    _sample_kernel[(chunks, batch)](
        logits, temperatures, seeds, positions, rows, last_tokens, out_scores, out_ids, scores, ids,
        arrival_counters(device), *(peers[:3] if peers else (ids, ids, ids)), logits.stride(0), vocab, vocab_offset,
        # one size for all numbers of tiles
        tiles, BLOCK=block, BLOCK_C=next_power_of_2(-(-vocab // block)), num_warps=warps,
        RANK=peers.rank if peers else 0, SIZE=len(peers.deltas) if peers else 1,
        W=peers.words.shape[2] if peers else 0, **pdl(device),
    )  # fmt: skip
    return out_scores, out_ids


sample_with_scores = by_device(sample_with_scores_triton, sample_with_scores_reference)


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor | None = None,
    last_tokens: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """logits [B, V] (any float type), temperatures [S] fp32, seeds [S] int64, positions [B] int -> ids [B] int64.

    Temperature 0 is greedy. Equal scores: the lowest id. NaN loses against everything.
    rows [B] int32: where the temperature and seed of each are, and its place in `last_tokens` [S] int64, which gets the
    ids too if given; None: S = B, in the same order. out: for the result.
    """
    return sample_with_scores(logits, temperatures, seeds, positions, rows, last_tokens, out)[1]
