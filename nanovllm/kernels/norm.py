"""RMSNorm where no product does it; the residual is added by the product before it (`kernels/linear.py`).

Also what is left of a norm after a product that left it out: one factor a row, for the kernel that reads the product.

Invariant: the mean square is summed in fp32, whatever the type of the model.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels._triton import LARGE_PREFILL, by_device, next_power_of_2, pdl, tl, triton, wait_for_inputs


class PendingNorm(NamedTuple):
    """The norm of rows x [N, size] that is still to be applied to their product: a factor of 1 / rms(x).

    squares: sums of squares of parts of each row of x [N, parts], fp32, contiguous.
    """

    squares: Tensor
    size: int
    eps: float

    def apply(self, y: Tensor) -> Tensor:
        """y [N, M] -> fp32."""
        return y.float() * torch.rsqrt(self.squares.sum(1, keepdim=True) / self.size + self.eps)


@triton.jit
def pending_factor(squares, row, parts, size, norm_eps, BLOCK_P: tl.constexpr):
    part = tl.arange(0, BLOCK_P)
    square = tl.load(squares + row * parts + part, mask=part < parts, other=0.0)
    return tl.rsqrt(tl.sum(square, 0) / size + norm_eps)


def pending_args(norm: PendingNorm | None, unused: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that calls `pending_factor` if BLOCK_P is not 0."""
    if norm is None:
        return {"squares": unused, "parts": 0, "size": 0, "norm_eps": 0.0, "BLOCK_P": 0}
    squares, size, eps = norm
    parts = squares.shape[1]
    block = next_power_of_2(max(parts, 32))  # one kernel for the usual numbers
    return {"squares": squares, "parts": parts, "size": size, "norm_eps": eps, "BLOCK_P": block}


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [N, H] (rows may be strided), weight [H] or None: all 1 -> [N, H]: x / rms(x) * weight."""
    f = x.float()
    y = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


@triton.jit(do_not_specialize=["N"])
def _rms_norm_kernel(
    x, weight, out, x_stride, N, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows. The normalised row is rounded to the storage type, as transformers does."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (cols < H)
    w = 1.0
    if WEIGHT:
        w = tl.load(weight + cols, mask=cols < H, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    h = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = (h * tl.rsqrt(tl.sum(h * h, 1) / H + eps)[:, None]).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * H + cols, (y * w).to(out.dtype.element_ty), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    n, h = x.shape
    out = torch.empty((n, h), dtype=x.dtype, device=x.device)
    block = next_power_of_2(h)
    rows = max(4096 // block, 1) if n >= LARGE_PREFILL else 1  # many small programs take longer to start than to run
    _rms_norm_kernel[(-(-n // rows),)](
        x, x if weight is None else weight, out, x.stride(0), n, eps, H=h, ROWS=rows, BLOCK=block,
        WEIGHT=weight is not None, num_warps=min(max(block // 512, 4), 16), **pdl(x.device),
    )  # fmt: skip
    return out


rms_norm = by_device(rms_norm_triton, rms_norm_reference)
