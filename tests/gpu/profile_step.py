"""Where the time of a decode step goes: kernels from the GPU itself, and the host's share. Not a test.

Usage: python tests/gpu/profile_step.py [--model qwen3-0.6b] [--batch 1 16 256] [--context 900]
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import COMMON, SHAPES
from nanovllm import LLM, SamplingParams

STEPS = 20


def host_times(llm: LLM, steps: int) -> dict[str, float]:
    """Median microseconds a step that each part takes on the host, and the step as a whole."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def wrapper(*args: object) -> object:
            start = time.perf_counter()
            result = inner(*args)
            spent[name].append(time.perf_counter() - start)
            return result

        setattr(owner, name, wrapper)

    for owner, name in (
        (llm.scheduler, "schedule"), (llm.runner, "launch"), (llm.scheduler, "advance"), (llm.scheduler, "postprocess"),
    ):  # fmt: skip
        timed(owner, name)
    for _ in range(steps):
        start = time.perf_counter()
        llm.step()
        spent["step"].append(time.perf_counter() - start)
    for owner, name in ((llm.scheduler, "schedule"), (llm.scheduler, "advance"), (llm.scheduler, "postprocess")):
        delattr(owner, name)
    del llm.runner.launch
    return {name: sorted(times)[len(times) // 2] * 1e6 for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--context", type=int, default=900)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**COMMON, **SHAPES[args.model]}))
        start = time.perf_counter()
        with LLM(folder, load_format="dummy", max_num_seqs=max(args.batch)) as llm:
            print(f"constructor {time.perf_counter() - start:.2f} s, {llm.runner.num_kvcache_blocks} blocks")
            for batch in args.batch:
                report(llm, batch, args.context)


def report(llm: LLM, batch: int, context: int) -> None:
    params = SamplingParams(temperature=0.6, max_tokens=2000, ignore_eos=True, detokenize=False)
    for i in range(batch):
        llm.add_request([(i * 31 + j * 7) % 9973 for j in range(context)], params)
    while llm.scheduler.waiting:
        llm.step()
    for _ in range(10):
        llm.step()
    host = host_times(llm, 50)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        start = time.perf_counter()
        for _ in range(STEPS):
            llm.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / STEPS * 1e6
    kernels = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / STEPS
    print(f"\n{batch} sequences of {context} tokens: {host['step']:.0f} us a step")
    print(f"profiled: {wall:.0f} us a step, GPU busy {busy:.0f}")
    print("host, us: " + ", ".join(f"{name} {us:.0f}" for name, us in host.items() if name != "step"))
    for event in kernels[:16]:
        us = event.self_device_time_total / STEPS
        count = event.count / STEPS
        print(f"{us:9.1f} us {us / busy:6.1%} {count:6.1f} x {us / count:7.2f}  {event.key[:70]}")
    size = next(s for s in llm.runner.graph_sizes if s >= batch)
    graph = llm.runner.graphs[size, llm.runner.reads_shared]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):  # the engine knows nothing of these: the sequences end here
        graph.replay()
    torch.cuda.synchronize()
    alone = (time.perf_counter() - start) / STEPS * 1e6
    print(f"the graph alone, replayed without a host between: {alone:.0f} us, {alone / host['step']:.1%} of a step")
    for seq_id in list(llm.sequences):
        llm.abort(seq_id)


if __name__ == "__main__":
    main()
