"""Ranks that fail on purpose or have another setting: what a spawned process runs in place of `worker.serve`."""

import os
import signal
from typing import Any

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
    parallel.PEER_BYTES = 0
    worker.serve(*args)
