"""Sum over the ranks, residual and sums of squares in one launch: every rank reads the others' parts of the sum.

Each rank has written its part into memory that all can read. A program tells its like on the other ranks that the part
is there, waits for theirs, and adds up all of them. Invariants: ranks make the same calls in the same order; two calls
one after the other have different parts, because a rank may still read the first one when another has finished it;
parts are added in the order of the ranks, so that the sum is the same everywhere.
"""

import torch
from torch import Tensor

from nanovllm.kernels._triton import next_power_of_2, pdl, tl, triton, wait_for_inputs

PROGRAMS = 4096  # most of a launch: each has a flag for every rank


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


def add_parts_triton(part: Tensor, residual: Tensor, flags: Tensor, turns: Tensor, deltas: Tensor, rank: int) -> Tensor:
    """residual [N, H] += the sum of all ranks' `part` [N, H], in place -> sums of squares of parts of rows [N, parts].

    flags [ranks, PROGRAMS] int64, in the same memory as `part`, and turns [PROGRAMS] int64: zero at first.
    deltas [ranks] int64: bytes from our memory to that of each rank. N is at most PROGRAMS.
    """
    (n, h), ranks = residual.shape, len(deltas)
    chunks = min(max(256 // n, 1), next_power_of_2(-(-h // 512)))  # small programs: latency is what counts
    block = next_power_of_2(-(-h // chunks))
    chunks = -(-h // block)
    squares = torch.empty((n, chunks), dtype=torch.float32, device=residual.device)
    _add_parts_kernel[(chunks, n)](
        part, residual, squares, flags, turns, deltas, h, RANK=rank, SIZE=ranks, BLOCK=block,
        ITEMSIZE=part.element_size(), PROGRAMS=PROGRAMS, num_warps=min(max(block // 256, 1), 8), **pdl(residual.device),
    )  # fmt: skip
    return squares
