"""RMSNorm with the residual addition that always comes before it."""

import torch
from torch import nn

from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.layers.linear import new_weight
from nanovllm.utils.checkpoint import Checkpoint


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_weight(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum as the next residual (in place where there is one)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps), residual

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        part = checkpoint.read(f"{name}.weight", tuple(self.weight.shape))
        if part is not None:
            self.weight.copy_(part)
