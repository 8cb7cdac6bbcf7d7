"""Parallel: a rank's place in a tensor-parallel group and the collectives it takes part in.

It must not know of models or engines. The group is an object of its own, not torch.distributed's default one, so any
number of engines can live in one process. Invariant: on GPUs a collective is a plain operation of the current stream,
also in a capture, and leaving a group never waits for another rank.
"""

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_c10d: Any = torch._C._distributed_c10d
CONNECT_TIMEOUT = timedelta(seconds=60)
# Whether small sums on GPUs go through memory that all ranks can read, instead of NCCL. On two H200s the first engine
# of a process is faster with it (8B: `batch16` 1.97 s against 2.21, `bench` 8.90 against 9.10). Off: a second engine of
# the same process, and a killed rank, have not been seen to work with it.
SYMMETRIC_MEMORY = False
ONE_SHOT_BYTES, TWO_SHOT_BYTES = 1 << 20, 8 << 20


def all_reduce_kind(num_bytes: int) -> str:
    """What is fastest, measured on two H200s: every rank reads all, or sums its part and collects the rest, or NCCL."""
    if num_bytes % 16 or num_bytes > TWO_SHOT_BYTES:
        return "nccl"
    return "one_shot" if num_bytes <= ONE_SHOT_BYTES else "two_shot"


@dataclass(slots=True)
class Parallel:
    """Rank `rank` of `size`; the default is a group of one, where collectives do nothing.

    buffer: memory that all ranks can read, known to them by `name`; pads: of each rank, the flags they wait for in it.
    named, store: the group that torch finds by `name`, and its store, as long as somebody holds them.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    name: str = ""
    named: Any = None
    store: Any = None
    buffer: torch.Tensor | None = None
    pads: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, folder: str) -> "Parallel":
        """Meet the other ranks through a file in `folder`: by NCCL on GPUs, else by gloo on the loopback interface."""
        store = dist.FileStore(f"{folder}/store", size)
        store.set_timeout(CONNECT_TIMEOUT)
        if device.type == "cuda":
            self = cls(rank, size, dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options()))
            self.minimum(0, device)  # the first collective is what connects
            if SYMMETRIC_MEMORY:
                self._share_memory(folder, store, device)
            return self
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        group = gloo(store, rank, size, options)
        group._set_default_timeout(timedelta(days=365))  # a peer that dies closes its connections
        return cls(rank, size, group)

    def all_reduce(self, x: torch.Tensor, op: str = "SUM") -> torch.Tensor:
        """Sum of `x` over the ranks, in `x` or a new tensor."""
        if self.size == 1:
            return x
        kind = all_reduce_kind(x.nbytes)
        if self.buffer is not None and kind != "nccl" and op == "SUM" and x.dtype in (torch.bfloat16, torch.float32):
            shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
            if kind == "one_shot":
                return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self.name)
            shared.copy_(x)
            return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self.name, x)
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

    def leave(self, stuck: bool = False) -> None:
        """Give up the group without waiting for anyone; what waits for a dead rank on the GPU ends, with rubbish.

        stuck: whether a rank has died.
        """
        group, self.group, self.buffer = self.group, None, None
        if group is not None and group.name() == "nccl":
            if stuck and self.pads:
                threading.Thread(target=self._answer_for_the_dead, daemon=True).start()
            group.abort()  # returns when no graph holds its kernels any more
            if self.pads:
                torch.cuda.synchronize(self.pads[0].device)
                _c10d._unregister_process_group(self.name)
            self.pads = []

    def _answer_for_the_dead(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self.pads[0].device)):
            while pads := self.pads:
                for rank, pad in enumerate(pads):  # ours: they are there; theirs: they have seen us
                    pad.fill_(int(rank == self.rank))
                torch.cuda.current_stream().synchronize()

    def _share_memory(self, name: str, store: Any, device: torch.device) -> None:
        """Set up `buffer`, unless the GPUs or this torch cannot do it; multicast is never used."""
        buffer, pads = None, []
        try:
            symmetric = _c10d._SymmetricMemory
            self.store = store = _NumberedFromZero(dist.PrefixStore("symmetric-memory", store))
            symmetric.set_group_info(name, self.rank, self.size, store)
            # newer torch looks the group up by its name, and wants no more of it than its store
            self.named = dist.ProcessGroup(store, self.rank, self.size)
            _c10d._register_process_group(name, self.named)
            buffer = symmetric.empty_strided_p2p((TWO_SHOT_BYTES,), (1,), torch.uint8, device, name)
            handle = symmetric.rendezvous(buffer, name)
            pads = [handle.get_signal_pad(rank, dtype=torch.int32) for rank in range(self.size)]
            pads[self.rank].clone().fill_(1)  # a kernel cannot be loaded any more when another one is stuck
        except (AttributeError, RuntimeError, ValueError):
            pass
        if self.minimum(len(pads), device):
            self.name, self.buffer, self.pads = name, buffer, pads


class _NumberedFromZero(dist.Store):
    """Renames the keys kind/number/rank of a set-up, which torch numbers by counters of the process: a rank that has
    been in another group before must find those that have not."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        self.first: dict[str, int] = {}  # number of each kind

    def _rename(self, key: str) -> str:
        kind, number, *rest = key.split("/")
        first = self.first.setdefault(kind, int(number))
        return "/".join([kind, str(int(number) - first), *rest])

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._rename(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._rename(key))

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self.store.wait([self._rename(key) for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self._rename(key), amount)


def _finish(work: Any) -> None:
    if work is not None:  # NCCL has put it on the stream already
        work.wait()
