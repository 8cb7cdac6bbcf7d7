"""Sum over the ranks, residual and sums of squares in one launch: every rank reads the others' parts of the sum.

Each rank has written its part into memory that all can read. A program tells its like on the other ranks that the part
is there, waits for theirs, and adds up all of them. Few rows are sent instead, in words that say in which turn they
were: 2.1 us for 2 KB on two H200s where the question takes 3.9 and NCCL 10. A sampler sends its best the same way.

Invariants: ranks make the same calls in the same order; two calls one after the other have different parts and words,
because a rank may still read the first ones when another has finished; parts are added in the order of the ranks, so
that the sum is the same everywhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels._triton import let_next_start, next_power_of_2, pdl, tl, triton, wait_for_inputs, wait_for_last

PROGRAMS = 4096  # most of a launch: each has a flag for every rank


class Words(NamedTuple):
    """What ranks write to each other in words of 8 bytes that arrive as one: 32 bits and in which turn they were sent.

    words [2, ranks, W] int64: what each rank has written here in odd and in even turns, in memory that all can write.
    turns [W] int64: in which turn each word is; zero at first, as words are. deltas [ranks] int64: bytes from our
    memory to that of each rank, of which ours is `rank`.
    """

    words: Tensor
    turns: Tensor
    deltas: Tensor
    rank: int


def add_parts_reference(parts: list[Tensor], residual: Tensor) -> Tensor:
    """residual [N, H] += the sum of parts, each [N, H], in place -> sums of squares of the new rows [N, 1], fp32."""
    total = residual.float()
    for part in parts:
        total = total + part.float()
    residual.copy_(total)
    return residual.float().square().sum(1, keepdim=True)


@triton.jit
def _add_parts_kernel(
    part, residual, squares, flags, turns, deltas, H, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ITEMSIZE: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part of a row, row). flags: of each rank, in which turn its programs are; turns: in which ours are."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    program = row * tl.num_programs(0) + chunk
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    offs = row.to(tl.int64) * H + cols
    wait_for_inputs(PDL)
    turn = tl.load(turns + program) + 1
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = flags + tl.load(deltas + rank) // 8 + RANK * PROGRAMS + program
            tl.atomic_xchg(theirs, turn, sem="release", scope="sys")
    total = tl.load(residual + offs, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            while tl.atomic_add(flags + rank * PROGRAMS + program, 0, sem="acquire", scope="sys") < turn:
                pass
    tl.debug_barrier()  # nobody reads before the thread that has waited
    for rank in tl.static_range(SIZE):
        there = part + tl.multiple_of(tl.load(deltas + rank) // ITEMSIZE, 8)
        total += tl.load(there + offs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = total.to(residual.dtype.element_ty)
    tl.store(residual + offs, y, mask=mask)
    stored = y.to(tl.float32)
    tl.store(squares + program, tl.sum(stored * stored, 0))
    tl.store(turns + program, turn)


@triton.jit
def _mark(turn):
    return (turn & 0x3FFFFFFF) | 0x40000000


@triton.jit
def send_words(bits, words, deltas, offs, mask, turn, RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr):
    """To all other ranks, `bits` int32 as words `offs` of this turn."""
    word = (_mark(turn) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = words + tl.load(deltas + rank) // 8 + offs
            tl.store(theirs + ((turn & 1) * SIZE + RANK) * W, word, mask=mask)


@triton.jit
def receive_words(words, rank, offs, mask, turn, SIZE: tl.constexpr, W: tl.constexpr):
    """The bits that `rank` sends in this turn, int32. A negative word is from nobody: see `PeerSums`."""
    here = words + ((turn & 1) * SIZE + rank) * W + offs
    mark = _mark(turn)
    word = tl.load(here, mask=mask, other=-1, volatile=True)
    while tl.max(((word >= 0) & ((word >> 32) != mark)).to(tl.int32)) > 0:
        word = tl.load(here, mask=mask, other=-1, volatile=True)
    return tl.where(mask, word, 0).to(tl.int32)


@triton.jit
def _halves(pair, like):
    """Two elements, fp32, of integers of 32 bits."""
    low = (pair & 0xFFFF).to(tl.int16).to(like, bitcast=True)
    return low.to(tl.float32), ((pair >> 16) & 0xFFFF).to(tl.int16).to(like, bitcast=True).to(tl.float32)


@triton.jit
def _add_few_parts_kernel(
    part, residual, squares, words, turns, deltas, H, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part of a row, row). Here ranks write to each other: with two elements and the turn in each word there
    is no flag and no second way over the wire. H: pairs a row."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    offs = row * H + cols
    part = part.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = residual.to(tl.pointer_type(tl.int32), bitcast=True)
    like: tl.constexpr = residual.dtype.element_ty
    let_next_start(PDL)  # these programs are small, and what follows reads weights meanwhile
    wait_for_last(PDL)
    turn = tl.load(turns + offs, mask=mask, other=0) + 1
    own = tl.load(part + offs, mask=mask, other=0)
    send_words(own, words, deltas, offs, mask, turn, RANK, SIZE, W)
    low, high = _halves(tl.load(pairs + offs, mask=mask, other=0), like)
    for rank in tl.static_range(SIZE):
        pair = own
        if rank != RANK:
            pair = receive_words(words, rank, offs, mask, turn, SIZE, W)
        more_low, more_high = _halves(pair, like)
        low += more_low
        high += more_high
    y_low = low.to(like)
    y_high = high.to(like)
    bits = y_low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    tl.store(pairs + offs, (y_high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | bits, mask=mask)
    low = y_low.to(tl.float32)
    high = y_high.to(tl.float32)
    tl.store(squares + row * tl.num_programs(0) + chunk, tl.sum(low * low + high * high, 0))
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns + offs, turn, mask=mask)


def add_parts_triton(part: Tensor, residual: Tensor, flags: Tensor, turns: Tensor, peers: Words) -> Tensor:
    """residual [N, H] += the sum of all ranks' `part` [N, H], in place -> sums of squares of parts of rows [N, parts].

    flags [ranks, PROGRAMS] int64, in the same memory as `part` and words, and turns [PROGRAMS] int64: zero at first.
    N is at most PROGRAMS.
    """
    (n, h), (words, word_turns, deltas, rank) = residual.shape, peers
    ranks, pairs = words.shape[1:]
    few = part.element_size() == 2 and h % 2 == 0 and part.numel() <= 2 * pairs
    chunks = next_power_of_2(-(-h // 512))  # small programs: latency is what counts
    if not few:
        chunks = min(max(256 // n, 1), chunks)
    block = next_power_of_2(-(-h // chunks))
    chunks = -(-h // block)
    squares = torch.empty((n, chunks), dtype=torch.float32, device=residual.device)
    warps = min(max(block // 256, 1), 8)
    if few:
        _add_few_parts_kernel[(chunks, n)](
            part, residual, squares, words, word_turns, deltas, h // 2, RANK=rank, SIZE=ranks, BLOCK=block // 2,
            W=pairs, num_warps=warps, **pdl(residual.device),
        )  # fmt: skip
        return squares
    _add_parts_kernel[(chunks, n)](
        part, residual, squares, flags, turns, deltas, h, RANK=rank, SIZE=ranks, BLOCK=block,
        ITEMSIZE=part.element_size(), PROGRAMS=PROGRAMS, num_warps=warps, **pdl(residual.device),
    )  # fmt: skip
    return squares
