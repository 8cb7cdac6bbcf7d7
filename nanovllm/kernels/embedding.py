"""Embedding of token ids by one share of the vocabulary, with the sum of squares that the first norm asks for.

torch's own lookup takes 12 us of an H200 for up to 16 ids. Invariant: no row outside of the share is read, whatever the
ids are.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._triton import by_device, next_power_of_2, pdl, tl, triton, wait_for_inputs


def embed_reference(ids: Tensor, weight: Tensor, start: int, out: Tensor) -> Tensor:
    """ids [N] int32 or int64, weight [V, H] of the ids from `start` on: their rows, zeros for other ids, in `out`
    [N, H] -> the sum of squares of each [N, 1] fp32."""
    i = ids - start
    mine = (i >= 0) & (i < weight.shape[0])
    out.copy_(F.embedding(i.where(mine, 0), weight).masked_fill_(~mine[:, None], 0))
    return out.float().square().sum(1, keepdim=True)


@triton.jit
def _embed_kernel(ids, weight, out, squares, start, share, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program an id."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    wait_for_inputs(PDL)
    i = tl.load(ids + n).to(tl.int64) - start
    x = tl.load(weight + i * H + cols, mask=cols < tl.where((i >= 0) & (i < share), H, 0), other=0.0)
    tl.store(out + n * H + cols, x, mask=mask)
    f = x.to(tl.float32)
    tl.store(squares + n, tl.sum(f * f, 0))


def embed_triton(ids: Tensor, weight: Tensor, start: int, out: Tensor) -> Tensor:
    n, (share, h) = len(ids), weight.shape
    squares = torch.empty((n, 1), dtype=torch.float32, device=ids.device)
    block = next_power_of_2(h)
    _embed_kernel[(n,)](
        ids, weight, out, squares, start, share, H=h, BLOCK=block, num_warps=min(max(block // 512, 4), 16),
        **pdl(ids.device),
    )  # fmt: skip
    return squares


embed = by_device(embed_triton, embed_reference)
