"""SiLU of the gate times the up projection, where the product before it has too many rows to do it itself.

Invariant: it rounds where transformers does.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.kernels._triton import by_device, pdl, tl, triton, wait_for_inputs


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2 I] (contiguous; gate first) -> silu(gate) * up [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _silu_mul_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * I + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + cols, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)  # rounded, as transformers does
    tl.store(out + row * I + cols, (silu * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    if n:
        grid = (n, -(-width // block))
        _silu_mul_kernel[grid](gate_up, out, I=width, BLOCK=block, num_warps=4, **pdl(gate_up.device))
    return out


silu_mul = by_device(silu_mul_triton, silu_mul_reference)
