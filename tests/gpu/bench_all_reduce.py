"""Times a sum over GPUs, 2 KB to 8 MB in a CUDA graph: NCCL, and our kernel with residual and squares. Not a test.

Usage: python tests/gpu/bench_all_reduce.py [number of GPUs]
"""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanovllm.utils import parallel

# an even number of calls: the halves of the memory alternate from one replay to the next, too
CALLS, REPEATS, HIDDEN = 50, 20, 1024


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, in a graph of CALLS of them."""
    call()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1000 / CALLS


@torch.inference_mode()
def run(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    parallel.PEER_BYTES = 64 << 20
    group = parallel.Parallel(rank, size)
    group.connect(torch.device("cuda", rank), folder)
    sums = group.sums
    if rank == 0:
        print(f"{size} GPUs, bf16, microseconds a sum\n    bytes     nccl     ours", flush=True)
        if sums is None:
            print("no memory that all GPUs see: NCCL alone")
    for num_bytes in (2 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20):
        x = torch.zeros(num_bytes // 2 // HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda")
        times = [microseconds(lambda x=x: group.all_reduce(x))]
        if sums and (part := sums.part(x)) is not None:
            part.fill_(rank + 1)
            x.fill_(0.5)
            sums.add(part, x)
            assert (x == 0.5 + size * (size + 1) / 2).all()

            def add(x: torch.Tensor = x) -> None:
                part = sums.part(x)
                assert part is not None
                sums.add(part, x)

            times.append(microseconds(add))
        if rank == 0:
            print(f"{num_bytes:>9}", *(f"{us:>8.1f}" for us in times), flush=True)
    torch.cuda.synchronize()
    group.leave()


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, size, folder), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
