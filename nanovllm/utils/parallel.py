"""Parallel: a rank's place in a tensor-parallel group and the collectives layers use."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank `rank` of `size`; the default is a group of one, where collectives do nothing."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [B, C] of all ranks side by side: [B, size * C]."""
        if self.size == 1:
            return x
        every = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(every, x.contiguous())
        return every.transpose(0, 1).flatten(1)

    def share(self, total: int) -> int:
        """Rows of `total` that each rank holds, the last ranks padded."""
        return -(-total // self.size)
