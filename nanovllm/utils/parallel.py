"""Parallel: a rank's place in a tensor-parallel group and the collectives it takes part in.

The group is an object of its own: nothing of torch.distributed's global state is used or changed, so any number of
engines can live in one process. On GPUs a collective is a plain operation of the current stream, also in a capture.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(slots=True)
class Parallel:
    """Rank `rank` of `size`; the default is a group of one, where collectives do nothing."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, folder: str) -> "Parallel":
        """Meet the other ranks through a file in `folder`: by NCCL on GPUs, else by gloo on the loopback interface."""
        store = dist.FileStore(f"{folder}/store", size)
        store.set_timeout(CONNECT_TIMEOUT)
        if device.type == "cuda":
            self = cls(rank, size, dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options()))
            self.minimum(0, device)  # the first collective is what connects
            return self
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        group = gloo(store, rank, size, options)
        group._set_default_timeout(timedelta(days=365))  # a peer that dies closes its connections
        return cls(rank, size, group)

    def all_reduce(self, x: torch.Tensor, op: str = "SUM") -> torch.Tensor:
        """Sum of `x` over the ranks, in place."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp, options.asyncOp = getattr(dist.ReduceOp, op), False
            _finish(self.group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] -> [size, ...]."""
        every = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _finish(self.group._allgather_base(every, x, options))
        return every.view(self.size, *x.shape)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of any rank."""
        return int(self.all_reduce(torch.tensor([value], device=device), "MIN"))

    def share(self, total: int) -> int:
        """Rows of `total` that each rank holds, the last ranks padded."""
        return -(-total // self.size)

    def leave(self) -> None:
        """Give up the group without waiting for anyone; what waits for another rank on a GPU ends, with rubbish."""
        group, self.group = self.group, None
        if group is not None and group.name() == "nccl":
            group.abort()


def _finish(work: Any) -> None:
    if work is not None:  # NCCL has put it on the stream already
        work.wait()
