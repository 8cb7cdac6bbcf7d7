"""Times a sum over GPUs by NCCL and through symmetric memory, 2 KB to 8 MB, in a CUDA graph. Not a test.

Usage: python tests/gpu/bench_all_reduce.py [number of GPUs]
"""

import multiprocessing
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanovllm.utils import parallel

KINDS, CALLS, REPEATS = ("nccl", "one_shot", "two_shot"), 50, 20


def microseconds(group: parallel.Parallel, num_bytes: int, kind: str) -> float:
    """Of one sum, in a graph of CALLS of them; the result is checked once."""
    parallel.all_reduce_kind = lambda _: kind
    x = torch.full((num_bytes // 2,), float(group.rank + 1), dtype=torch.bfloat16, device="cuda")
    assert (group.all_reduce(x.clone()) == group.size * (group.size + 1) / 2).all(), kind
    x.zero_()  # it may be summed in place, again and again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            group.all_reduce(x)
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
    parallel.SYMMETRIC_MEMORY = True
    group = parallel.Parallel.connect(rank, size, torch.device("cuda", rank), folder)
    kinds = KINDS if group.buffer is not None else KINDS[:1]
    chosen = parallel.all_reduce_kind
    if rank == 0:
        print(f"{size} GPUs, bf16, microseconds a sum\n{'bytes':>9}", *(f"{kind:>9}" for kind in kinds), "chosen")
    for num_bytes in (2 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20):
        times = [microseconds(group, num_bytes, kind) for kind in kinds]
        if rank == 0:
            print(f"{num_bytes:>9}", *(f"{us:>9.1f}" for us in times), chosen(num_bytes), flush=True)
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
