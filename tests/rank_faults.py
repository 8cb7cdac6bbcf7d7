"""Ranks that fail on purpose or live elsewhere: what a spawned process runs in place of `worker.serve`."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanovllm import OutOfMemoryError
from nanovllm.engine import worker
from nanovllm.utils import parallel, peer_memory


class FailsWhenBuilt(worker.ModelRunner):
    def _count_blocks(self) -> int:
        raise ZeroDivisionError("no such rank")


class HasNoMemory(worker.ModelRunner):
    def _count_blocks(self) -> int:
        raise OutOfMemoryError("7 MiB are missing")


class IsKilledWhenBuilt(worker.ModelRunner):
    def _count_blocks(self) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


class FailsInAStep(worker.ModelRunner):
    steps = 0

    def decode(self, *args: Any) -> Any:
        self.steps += 1
        if self.steps == 5:
            raise ZeroDivisionError("in the fifth step") from ValueError("long" * 1_000_000)
        return super().decode(*args)


class HasFewBlocks(worker.ModelRunner):
    def _count_blocks(self) -> int:
        return 7


def serve_with(runner: type[worker.ModelRunner], *args: Any) -> None:
    worker.ModelRunner = runner  # type: ignore[misc]
    worker.serve(*args)


def is_killed_at_once(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed_while_connecting(*args: Any) -> None:
    worker.Parallel.connect = is_killed_at_once  # type: ignore[method-assign,assignment]
    worker.serve(*args)


def serve_with_nccl_alone(*args: Any) -> None:
    parallel.PEER_BYTES = parallel.PEER_ROWS = 0
    worker.serve(*args)


class HostMemory:
    """A file that all ranks map, in place of `PeerMemory`."""

    def __init__(self, folder: str, group: parallel.Parallel) -> None:
        self.rank, length = group.rank, parallel.HEAD_BYTES + 3 * parallel.PEER_BYTES
        torch.from_file(f"{folder}/peer-{self.rank}", shared=True, size=length, dtype=torch.uint8)
        group.minimum(0, torch.device("cpu"))  # all files are there
        self.mapped = [
            torch.from_file(f"{folder}/peer-{peer}", shared=True, size=length, dtype=torch.uint8)
            for peer in range(group.size)
        ]
        self.addresses = [memory.data_ptr() for memory in self.mapped]

    def tensor(self) -> torch.Tensor:
        return self.mapped[self.rank]

    def free(self) -> None:
        self.mapped.clear()


class HostSums(parallel.PeerSums):
    def answer_for_the_dead(self) -> None:
        pass

    def free(self) -> None:
        self.memory.free()


connect = parallel.Parallel.connect


def connect_with_peer_sums(group: parallel.Parallel, device: torch.device, folder: str) -> None:
    """As on GPUs, with the kernel in Triton's interpreter."""
    connect(group, device, folder)
    memory: Any = HostMemory(folder, group)
    group.sums = HostSums(memory, lambda mine: bool(group.minimum(int(mine), device)))


def serve_with_peer_sums(*args: Any) -> None:
    worker.Parallel.connect = connect_with_peer_sums  # type: ignore[method-assign,assignment]
    worker.serve(*args)


class ThroughHost:
    """In place of NCCL, which refuses ranks that share a GPU: gloo, by way of the host."""

    Options = object

    def __init__(self, store: Any, rank: int, size: int, _: Any) -> None:
        self.group = parallel.gloo_group(store, rank, size)

    def name(self) -> str:
        return "gloo"

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        here = tensors[0].cpu() if tensors[0].dtype == torch.int64 else tensors[0].float().cpu()
        self.group.allreduce([here], options).wait(parallel.CONNECT_TIMEOUT)
        tensors[0].copy_(here)

    def _allgather_base(self, every: torch.Tensor, mine: torch.Tensor, options: Any) -> None:
        here = every.cpu()
        self.group._allgather_base(here, mine.cpu(), options).wait(parallel.CONNECT_TIMEOUT)
        every.copy_(here)


call = peer_memory.PeerMemory._call


def call_on_one_gpu(name: str, *args: Any) -> None:
    """A GPU is asked about itself, which is an error."""
    if name == "cuDeviceGetP2PAttribute":
        args[0]._obj.value = 1
    else:
        call(name, *args)


def share_one_gpu(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    patch(dist, "ProcessGroupNCCL", ThroughHost)
    patch(peer_memory.PeerMemory, "_call", staticmethod(call_on_one_gpu))


def serve_on_one_gpu(*args: Any) -> None:
    share_one_gpu()
    worker.serve(*args)
