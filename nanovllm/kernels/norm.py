"""RMSNorm, and residual add + RMSNorm in one pass."""

import torch
from torch import Tensor

from nanovllm.kernels._triton import next_power_of_2, pdl, tl, triton, wait_for_inputs


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, x_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    """One program a row. The sum and the normalised row are rounded to the storage type, as transformers does."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    h = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual + row * H + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        tl.store(residual + row * H + cols, rounded, mask=mask)
        h = rounded.to(tl.float32)
    y = (h * tl.rsqrt(tl.sum(h * h, 0) / H + eps)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * H + cols, (y * w).to(out.dtype.element_ty), mask=mask)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
    n, h = x.shape
    out = torch.empty((n, h), dtype=x.dtype, device=x.device)
    block = next_power_of_2(h)
    if n:
        _rms_norm_kernel[(n,)](
            x, residual, weight, out, x.stride(0), eps, H=h, BLOCK=block, ADD=add,
            num_warps=min(max(block // 512, 4), 16), **pdl(x.device),
        )  # fmt: skip
    return out


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, x, weight, eps, add=False)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, residual, weight, eps, add=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, H] (rows may be strided), weight [H] -> [N, H]: x / rms(x) * weight."""
    return (rms_norm_triton if x.is_cuda else rms_norm_reference)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [N, H] (contiguous) += x [N, H] in place, rounded to its type; returns RMSNorm(residual) * weight."""
    return (add_rms_norm_triton if x.is_cuda else add_rms_norm_reference)(x, residual, weight, eps)
