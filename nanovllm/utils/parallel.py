"""Parallel: a rank's place in a tensor-parallel group and the collectives it takes part in.

It must not know of models or engines. The group is an object of its own, not torch.distributed's default one, so any
number of engines can live in one process. Invariant: on GPUs a collective is a plain operation of the current stream,
also in a capture, and leaving a group never waits for another rank.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.kernels.all_reduce import PROGRAMS, Words, add_parts_triton
from nanovllm.utils.peer_memory import PeerMemory

CONNECT_TIMEOUT = timedelta(seconds=60)
# Sums of at most so many bytes from all other ranks go through memory that all can read, instead of NCCL. Measured on
# two H200s.
PEER_BYTES = 8 << 20
HEAD_BYTES = 6 << 20  # of flags and words: with two ranks, sums of up to 750 KiB are sent as words
# Sampled rows of at most so many sequences are compared by their kernel: one program of each waits for other ranks.
PEER_ROWS = 1024


@dataclass(slots=True)
class Parallel:
    """Rank `rank` of `size`; the default is a group of one, where collectives do nothing.

    sums: how sums of few rows are made on GPUs that see each other's memory.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sums: "PeerSums | None" = None

    def connect(self, device: torch.device, folder: str) -> None:
        """Meet the other ranks through a file in `folder`: by NCCL on GPUs, else by gloo on the loopback interface."""
        store = dist.FileStore(f"{folder}/store", self.size)
        store.set_timeout(CONNECT_TIMEOUT)
        if device.type == "cuda":
            self.group = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
            self.minimum(0, device)  # the first collective is what connects
            count = torch.cuda.device_count()
            devices = [(device.index + peer - self.rank) % count for peer in range(self.size)]

            def agree(mine: bool) -> bool:
                return bool(self.minimum(int(mine), device))

            with suppress(OSError):
                self.sums = PeerSums(PeerMemory(HEAD_BYTES + 3 * PEER_BYTES, self.rank, devices, folder, agree), agree)
            return
        self.group = gloo_group(store, self.rank, self.size)

    def all_reduce(self, x: torch.Tensor, op: str = "SUM") -> torch.Tensor:
        """Sum of `x` over the ranks, in place."""
        if self.size == 1:
            return x
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = getattr(dist.ReduceOp, op), False
        self._finish(self.group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] -> [size, ...]."""
        every = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        self._finish(self.group._allgather_base(every, x, options))
        return every.view(self.size, *x.shape)

    def _finish(self, work: Any) -> None:
        """Wait for `work` of gloo, which may wait for ever to send to a rank that has died; NCCL's is on the stream."""
        while work is not None:
            try:
                work.wait(timedelta(seconds=1))
                return
            except RuntimeError:
                if work.is_completed() or self.group is None:
                    raise

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of any rank."""
        return int(self.all_reduce(torch.tensor([value], device=device), "MIN"))

    def share(self, total: int) -> int:
        """Rows of `total` that each rank holds, the last ranks padded."""
        return -(-total // self.size)

    def abandon(self) -> None:
        """Give up the group without waiting for anyone; what waits for a dead rank on our GPU ends, with rubbish."""
        if self.sums:
            self.sums.answer_for_the_dead()
        group, self.group = self.group, None
        if group is not None and group.name() == "nccl":
            group.abort()  # returns when no graph holds its kernels any more

    def leave(self) -> None:
        """As `abandon`, and give back the memory. No kernel that uses it may follow."""
        self.abandon()
        if self.sums:
            self.sums.free()
            self.sums = None


def gloo_group(store: dist.Store, rank: int, size: int) -> Any:
    """A group over the loopback interface, whose collectives wait as long as it takes."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = CONNECT_TIMEOUT
    group = gloo(store, rank, size, options)
    group._set_default_timeout(timedelta(days=365))  # a peer that dies closes its connections
    return group


class PeerSums:
    """Adds up what the ranks have written into memory that all of them see, by a kernel of ours.

    memory: HEAD_BYTES for flags and words, then three regions for parts of sums. agree: as for `PeerMemory`.
    best: of `sample`, for at most PEER_ROWS rows.
    """

    def __init__(self, memory: PeerMemory, agree: Callable[[bool], bool]) -> None:
        self.memory, rank, size, self.region = memory, memory.rank, len(memory.addresses), 0
        bytes_ = memory.tensor()
        self.head = bytes_[:HEAD_BYTES].view(torch.int64)
        sizes = [size * PROGRAMS, 4 * size * PEER_ROWS]
        flags, best, words = self.head.split([*sizes, len(self.head) - sum(sizes)])
        self.flags = flags.view(size, PROGRAMS)
        self.parts = bytes_[HEAD_BYTES:].view(3, (len(bytes_) - HEAD_BYTES) // 3)
        self.head.zero_()
        own = memory.addresses[rank]
        deltas = torch.tensor([address - own for address in memory.addresses], device=bytes_.device)
        each = len(words) // (2 * size) // 2 * 2  # of 16 bytes
        self.turns, word_turns, best_turns = (
            torch.zeros(n, dtype=torch.int64, device=bytes_.device) for n in (PROGRAMS, each, 2 * PEER_ROWS)
        )
        self.words = Words(words[: 2 * size * each].view(2, size, each), word_turns, deltas, rank)
        self.best = Words(best.view(2, size, 2 * PEER_ROWS), best_turns, deltas, rank)
        self.answer = torch.cat((torch.full(flags.shape, 1 << 62), torch.full((len(best) + len(words),), -1)))
        if self.flags.is_cuda:
            self.answer = self.answer.pin_memory()
        self.ended, self.thread = threading.Event(), threading.Thread(target=self._keep_answering, daemon=True)
        agree(True)  # all flags are zero

    def part(self, x: torch.Tensor, first: bool = False) -> torch.Tensor | None:
        """Where this rank writes its part of a sum that `add` is to add to `x` [N, H]; `None` if it is too large.

        first: of a pass, which has a region of its own; the others alternate between two. A pass has three, five or
        more sums, so two one after the other never have the same region.
        """
        if x.nbytes * (len(self.flags) - 1) > self.parts.shape[1] or len(x) > PROGRAMS:
            return None
        self.region = 0 if first else 1 + self.region % 2
        return self.parts[self.region, : x.nbytes].view(x.dtype).view(x.shape)

    def add(self, part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x += the sum of all ranks' `part`, in place; sums of squares of parts of its rows [N, parts], fp32."""
        return add_parts_triton(part, x, self.flags, self.turns, self.words)

    def answer_for_the_dead(self) -> None:
        """What waits for another rank on our GPU ends, with rubbish."""
        with suppress(RuntimeError):  # the thread runs already, or none can start any more
            self._answer()
            self.thread.start()

    def _answer(self) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self.flags.device)):
            # a copy: a kernel might find no room beside those that wait
            self.head.copy_(self.answer, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def _keep_answering(self) -> None:
        while not self.ended.wait(0.001):  # those that live still write their flags
            self._answer()

    def free(self) -> None:
        """Give the memory back, after `answer_for_the_dead`; no kernel may use it any more."""
        torch.cuda.synchronize(self.flags.device)
        self.ended.set()
        if self.thread.ident:
            self.thread.join()
        self.memory.free()
