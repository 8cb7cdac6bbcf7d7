"""Linear layers sharded over the ranks of a tensor-parallel group; each loads only its own slice.

Column-parallel layers hold a share of the outputs, row-parallel ones a share of the inputs and add up the partial
results. Sizes that do not divide are padded with zeros, which change no result. The norm before a column-parallel
layer and the residual after a row-parallel one belong to its product: a kernel does both at once where a step has few
tokens. They must not know what the rows mean. Invariant: the `Stream` that goes into a column-parallel layer and comes
out of a row-parallel one is the same on every rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.kernels.linear import linear_add, norm_linear
from nanovllm.kernels.norm import PendingNorm
from nanovllm.utils.checkpoint import Checkpoint, new_weight
from nanovllm.utils.parallel import Parallel


class Stream(NamedTuple):
    """The residual stream x [N, hidden], and sums of squares of each row's parts [N, parts] where they are known."""

    x: Tensor
    squares: Tensor | None = None


class ColumnParallelLinear(nn.Module):
    """y = RMSNorm(x) W^T + b for one or several matrices of the same input, merged into one product.

    The weight of the norm is multiplied into W. `eps` is that of the norm.
    in_features, out_features: sizes of the whole layer; `out_features` has one entry a matrix.
    shares: of each matrix, the first row that this rank holds and how many.
    silu: of two matrices, gate and up, the result is silu(gate) * up.
    """

    def __init__(
        self, in_features: int, out_features: list[int], shares: list[tuple[int, int]], bias: bool, silu: bool,
        eps: float, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.shares = in_features, out_features, shares
        self.silu, self.eps = silu, eps
        rows = sum(size for _, size in shares)
        self.weight = new_weight(rows, in_features, dtype=dtype, device=device)
        self.bias = new_weight(rows, dtype=dtype, device=device) if bias else None

    def forward(self, stream: Stream) -> tuple[Tensor, PendingNorm | None]:
        """y, and the norm where whatever reads y is still to apply it."""
        return norm_linear(stream.x, stream.squares, self.eps, self.weight, self.bias, self.silu)

    def load(self, checkpoint: Checkpoint, norm: str, *names: str) -> None:
        """Read the weight of the norm and this rank's rows of each matrix, names without ".weight"."""
        row = 0
        for name, out, (start, size) in zip(names, self.out_features, self.shares):
            rows = slice(row, row + size)
            checkpoint.read(self.weight[rows], f"{name}.weight", (out, self.in_features), 0, start)
            if self.bias is not None:
                checkpoint.read(self.bias[rows], f"{name}.bias", (out,), 0, start)
            row += size
        norm_weight = torch.ones_like(self.weight[0])
        checkpoint.read(norm_weight, f"{norm}.weight", (self.in_features,))
        self.weight.mul_(norm_weight)


class RowParallelLinear(nn.Module):
    """residual += sum over the ranks of x_rank W_rank^T, plus b; inputs are split as `share` says."""

    def __init__(
        self, in_features: int, out_features: int, share: tuple[int, int], bias: bool,
        parallel: Parallel, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.share, self.parallel = in_features, out_features, share, parallel
        self.weight = new_weight(out_features, share[1], dtype=dtype, device=device)
        self.bias = new_weight(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor, residual: Tensor) -> Stream:
        """`residual` in place; every rank comes with the same, and the first one adds its own to the sum."""
        parallel, sums = self.parallel, self.parallel.sums
        if sums and (part := sums.part(residual)) is not None:
            linear_add(x, self.weight, self.bias, part, add=False)
            return Stream(residual, sums.add(part, residual))
        squares = linear_add(x, self.weight, self.bias, residual, parallel.rank == 0)
        return Stream(residual, squares) if parallel.size == 1 else Stream(parallel.all_reduce(residual))

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        checkpoint.read(self.weight, f"{name}.weight", (self.out_features, self.in_features), 1, self.share[0])
        if self.bias is not None:
            checkpoint.read(self.bias, f"{name}.bias", (self.out_features,))
            if self.parallel.rank:
                self.bias.zero_()  # the first rank adds it, once
