"""RMSNorm: its weight, and the norm itself where no product follows that does it.

It must not know of ranks. Invariant: the weight is whole on every rank.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels.norm import rms_norm
from nanovllm.utils.checkpoint import Checkpoint, new_weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_weight(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        checkpoint.read(self.weight, f"{name}.weight", tuple(self.weight.shape))
