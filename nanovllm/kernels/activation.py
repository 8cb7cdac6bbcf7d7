"""SiLU of the gate times the up projection, where the product before it has too many rows to do it itself.

Invariant: it rounds where transformers does.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._triton import by_device, pdl, tl, triton, wait_for_inputs
from nanovllm.kernels.norm import PendingNorm, pending_args, pending_factor


def silu_mul_reference(gate_up: Tensor, norm: PendingNorm | None = None) -> Tensor:
    """gate_up [N, 2 I] (contiguous; gate first) -> silu(gate) * up [N, I], after `norm` if one is given."""
    gate, up = (norm.apply(gate_up) if norm else gate_up).chunk(2, -1)
    return (F.silu(gate).to(gate_up.dtype) * up).to(gate_up.dtype)


@triton.jit(do_not_specialize=["parts"])
def _silu_mul_kernel(
    gate_up, out, squares, parts, size, norm_eps, I: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E741
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * I + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + cols, mask=mask, other=0.0).to(tl.float32)
    if BLOCK_P:
        factor = pending_factor(squares, row, parts, size, norm_eps, BLOCK_P)
        gate = gate * factor
        up = up * factor
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)  # rounded, as transformers does
    tl.store(out + row * I + cols, (silu * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: Tensor, norm: PendingNorm | None = None) -> Tensor:
    n, width, block = gate_up.shape[0], gate_up.shape[1] // 2, 1024
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(n, -(-width // block))](
        gate_up, out, I=width, BLOCK=block, num_warps=4, **pending_args(norm, gate_up), **pdl(gate_up.device)
    )
    return out


silu_mul = by_device(silu_mul_triton, silu_mul_reference)
