"""Ranks that fail on purpose or have another setting: what a spawned process runs in place of `worker.serve`."""

import os
import signal
from typing import Any

import torch

from nanovllm import OutOfMemoryError
from nanovllm.engine import worker
from nanovllm.utils import parallel


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
            raise ZeroDivisionError("in the fifth step")
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
