"""Times every kernel on the GPU, in CUDA graphs over rotating inputs; --tune tries configurations. Not a test.

Usage: python tests/gpu/bench_kernels.py [--tune] [names that a case's name must contain one of]
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanovllm.kernels import (
    activation,
    attention_decode,
    attention_prefill,
    embedding,
    linear,
    norm,
    rope,
    sampling,
    step_inputs,
    truncation,
)

HQ, HK, D, HIDDEN, INTERMEDIATE, VOCAB, BLOCK = 16, 8, 128, 1024, 3072, 151936, 256  # Qwen3-0.6B
Call = Callable[..., Any]


@dataclass
class Case:
    name: str
    make: Callable[[int], Call]  # from a seed: fresh inputs, and the call on them, which takes a configuration
    amount: float  # bytes or floating-point operations of a call
    rotate: int  # input sets, so that the caches do not hold them
    target: str = ""
    configs: list[dict[str, Any]] = field(default_factory=list)
    flops: bool = False

    def rate(self, us: float) -> str:
        return f"{self.amount / us / 1e6:7.2f} {'TFLOP/s' if self.flops else 'TB/s'}"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def ints(values: list[int] | range) -> Tensor:
    return torch.tensor(list(values), device="cuda", dtype=torch.int32)


def paged(lens: list[int], block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches and block tables for sequences of these lengths, blocks in random order."""
    counts = [-(-n // block) for n in lens]
    blocks = torch.randperm(sum(counts), device="cuda").int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    tables = torch.nn.functional.pad(tables, (0, 16 - tables.shape[1] % 16))
    caches = rand(2, sum(counts), block, HK, D)
    return caches[0], caches[1], tables, ints(range(len(lens)))


def decode_case(
    name: str, lens: list[int], rotate: int, target: str, configs: list[dict[str, Any]], of_qkv: bool = False
) -> Case:
    def make(seed: int) -> Call:
        q, cache, n, rotation = rand(len(lens), HQ, D), paged(lens), ints(lens), None
        if of_qkv:
            q = rand(len(lens), (HQ + 2 * HK) * D)
            rotation = attention_decode.Rotation(rand(D), rand(D), torch.rand(max(lens), D, device="cuda"), 1e-6)
        return lambda **kw: attention_decode.paged_decode_triton(q, *cache, n, D**-0.5, rotation=rotation, **kw)

    return Case(f"decode {name}", make, sum(lens) * HK * D * 4, rotate, target, configs)


def prefill_case(name: str, lens: list[int], new: int, target: str = "", block: int = BLOCK) -> Case:
    def make(seed: int) -> Call:
        q, cache = rand(len(lens) * new, HQ, D), paged(lens, block)
        args = (ints(range(0, (len(lens) + 1) * new, new)), ints(lens), new, D**-0.5)
        return lambda **kw: attention_prefill.paged_prefill_triton(q, *cache, *args, **kw)

    P = attention_prefill.PrefillConfig
    tiles = [P(128, 64, 8, 2, True, 128), P(128, 64, 8, 3, True, 128), P(128, 64, 8, 2, False, 128),
             P(128, 64, 8, 3, False, 128), P(128, 64, 4, 2, True), P(128, 128, 8, 2, True)]  # fmt: skip
    tiles = [t for t in tiles if not t.tma or block % t.keys == 0]
    configs: list[dict[str, Any]] = [{"config": c} for c in tiles]
    pairs = sum(new * (n - new) + new * new / 2 for n in lens)
    return Case(f"prefill {name}", make, 4 * HQ * D * pairs, 2, target, configs, flops=True)


def rope_case(rows: int, target: str) -> Case:
    tables: list[Tensor] = []  # one for all layers

    def make(seed: int) -> Call:
        tables.append(tables[0] if tables else torch.rand(4096, D, device="cuda"))
        caches, slots = rand(2, 256, BLOCK, HK, D), torch.randperm(256 * BLOCK, device="cuda")[:rows].int()
        qkv, w, positions = rand(rows, (HQ + 2 * HK) * D), rand(D), ints([i * 37 % 4096 for i in range(rows)])
        args = tables[-1], positions, slots, caches[0], caches[1], 1e-6
        return lambda **kw: rope.norm_rope_store_triton(qkv, w, w, *args, **kw)

    configs = [{"config": c} for c in ((8, 4), (8, 2), (8, 8), (4, 4), (4, 2), (16, 4), (16, 8), (2, 1))]
    # few input sets: in a model the kernel before has just written qkv
    return Case(f"norm+rope+store {rows}", make, rows * (HQ + 2 * HK) * D * 4, 4, target, configs)


def sample_case(rows: int, temperature: float, target: str) -> Case:
    def make(seed: int) -> Call:
        logits, t = 3 * rand(rows, VOCAB), torch.full((rows,), temperature, device="cuda")
        seeds, positions, live = torch.arange(rows, device="cuda"), ints(range(seed, seed + rows)), ints(range(rows))
        slots = live, torch.zeros_like(seeds), torch.empty_like(seeds)  # as a step calls it
        return lambda **kw: sampling.sample_with_scores_triton(logits, t, seeds, positions, *slots, **kw)

    tiles = (4, 6, 8, 12, 16) if rows > 64 else (1, 2)
    shapes = ((1024, 4), (2048, 8), (512, 4), (512, 2), (1024, 8))
    configs = [{"config": (b, t, w)} for (b, w), t in itertools.product(shapes, tiles)]
    return Case(f"sample {rows} T={temperature}", make, rows * VOCAB * 2, 4 if rows > 64 else 28, target, configs)


def truncate_case(rows: int, k: int, p: float, dtype: torch.dtype = torch.bfloat16, target: str = "") -> Case:
    """With a copy of the logits before each call, which changes them in place."""

    def make(seed: int) -> Call:
        logits, k_ = (3 * rand(rows, VOCAB)).to(dtype), ints([k] * rows)
        t, p_ = torch.full((rows,), 0.6, device="cuda"), torch.full((rows,), p, device="cuda")
        x, margins = torch.empty_like(logits), torch.full_like(t, -torch.inf)
        return lambda **kw: truncation.truncate_triton(x.copy_(logits), t, k_, p_, margins, **kw)

    configs: list[dict[str, Any]] = [
        {"config": c} for c in ((512, 16), (1024, 32), (1024, 16), (512, 8), (256, 8), (2048, 32), (2048, 16))
    ]
    name = f"copy+truncate {rows} {k} {p} {str(dtype)[6:]}"
    return Case(name, make, 2 * rows * VOCAB * dtype.itemsize, 4 if rows > 64 else 28, target, configs)


def small_cases(rows: int) -> list[Case]:
    def embed(seed: int) -> Call:
        ids, weight, out = torch.randint(VOCAB, (rows,), device="cuda"), rand(VOCAB, HIDDEN), rand(rows, HIDDEN)
        return lambda: embedding.embed_triton(ids, weight, 0, out)

    def rms_norm(seed: int) -> Call:
        x, w = rand(rows, HIDDEN), rand(HIDDEN)
        return lambda: norm.rms_norm_triton(x, w, 1e-6)

    def silu(seed: int) -> Call:
        x = rand(rows, 2 * INTERMEDIATE)
        return lambda: activation.silu_mul_triton(x)

    def step(seed: int) -> Call:
        state = torch.zeros(rows + 1, device="cuda").long(), ints(range(rows + 1)), ints(range(16)).repeat(rows + 1, 1)
        live, out = ints(range(rows)), torch.zeros(4, rows, device="cuda").int()
        return lambda: step_inputs.decode_inputs_triton(live, *state, BLOCK, *out)

    return [
        Case(f"embedding {rows}", embed, rows * HIDDEN * 4, 4),
        Case(f"norm {rows}", rms_norm, rows * HIDDEN * 4, 16),
        Case(f"silu*mul {rows}", silu, rows * INTERMEDIATE * 6, 16),
        Case(f"step inputs {rows}", step, rows * 40, 16),
    ]


def product_cases(rows: int) -> list[Case]:
    """The four products of a layer, each with 28 different weights."""

    def normed(out: int, silu: bool) -> Callable[[int], Call]:
        def make(seed: int) -> Call:
            x, weight = rand(rows, HIDDEN), rand(out, HIDDEN)
            squares = x.float().square().unflatten(1, (-1, 32)).sum(2) if rows <= 256 else None
            return lambda: linear.norm_linear(x, squares, 1e-6, weight, None, silu)

        return make

    def added(width: int) -> Callable[[int], Call]:
        def make(seed: int) -> Call:
            x, weight, residual = rand(rows, width), rand(HIDDEN, width), rand(rows, HIDDEN)
            return lambda: linear.linear_add(x, weight, None, residual)

        return make

    qkv, o = (HQ + 2 * HK) * D, HQ * D
    return [
        Case(f"norm+qkv {rows}", normed(qkv, False), qkv * HIDDEN * 2, 28),
        Case(f"o+add {rows}", added(o), o * HIDDEN * 2, 28),
        Case(f"norm+gate_up+silu {rows}", normed(2 * INTERMEDIATE, True), INTERMEDIATE * HIDDEN * 4, 28),
        Case(f"down+add {rows}", added(INTERMEDIATE), INTERMEDIATE * HIDDEN * 2, 28),
    ]


def all_cases() -> list[Case]:
    def grid(splits: tuple[int, ...], *configs: tuple[int, int, int]) -> list[dict[str, Any]]:
        return [{"num_splits": s, "config": c} for s in splits for c in configs]

    many = grid((1, 2, 4, 8), (32, 2, 5), (32, 2, 7), (32, 2, 3), (64, 4, 3))
    one = grid((8, 16, 32, 64), (32, 2, 5), (32, 2, 7), (64, 4, 3), (64, 4, 5))
    uneven = [1600 - 1500 * i // 255 for i in range(256)]  # the longest first, as the engine orders them
    return [
        *(c for rows in (1, 256) for c in small_cases(rows)),
        *(c for rows in (1, 4, 16, 32, 64, 128, 256) for c in product_cases(rows)),
        rope_case(1, "1.2 us"),
        rope_case(256, "3 us"),
        decode_case("256 x 900", [900] * 256, 2, "4.0 TB/s", many),
        decode_case("256 x 100-1600", uneven, 2, "", many),
        decode_case("128 x 100-1600", uneven[::2], 2, "", many),
        decode_case("64 x 900", [900] * 64, 4, "", many),
        decode_case("64 x 850-1600", uneven[:128:2], 4, "", many),
        decode_case("32 x 850-1600", uneven[:128:4], 8, "", many),
        decode_case("16 x 850-1600", uneven[:128:8], 16, "", many),
        decode_case("16 x 768", [768] * 16, 16, "", many),
        decode_case("1 x 2000", [2000], 28, "8 us", one),
        decode_case("1 x 400", [400], 28, "", one),
        decode_case("of qkv 1 x 400", [400], 28, "", one, of_qkv=True),
        decode_case("of qkv 16 x 768", [768] * 16, 16, "", many, of_qkv=True),
        decode_case("of qkv 64 x 900", [900] * 64, 4, "", many, of_qkv=True),
        decode_case("1 x 32000", [32000], 4, "", one),
        decode_case("16 x 8000", [8000] * 16, 2, "", many),
        prefill_case("16 x 1000", [1000] * 16, 1000, "330 TFLOP/s"),
        prefill_case("2 x 8000", [8000] * 2, 8000, "450 TFLOP/s"),
        prefill_case("32 x 64 after 2048", [2112] * 32, 64),
        prefill_case("4 x 3500", [3500] * 4, 3500),
        prefill_case("4 x 3500, blocks of 16", [3500] * 4, 3500, block=16),
        sample_case(256, 0.6, "60 us"),
        sample_case(1, 0.6, ""),
        sample_case(256, 0.0, ""),
        truncate_case(256, 0, 1.0),  # the copy alone
        truncate_case(256, 20, 0.95, target="250 us"),
        truncate_case(256, 50, 1.0, target="250 us"),
        truncate_case(256, 0, 0.9, target="250 us"),
        truncate_case(256, 50, 0.9, target="250 us"),
        truncate_case(256, 1000, 1.0, target="250 us"),
        truncate_case(256, 0, 0.5, target="250 us"),
        truncate_case(256, 0, 0.999),  # too many stay to be collected
        truncate_case(128, 20, 0.95),
        truncate_case(1, 20, 0.95),
        truncate_case(256, 20, 0.95, torch.float32),
        truncate_case(256, 0, 0.9, torch.float32),
    ]


def graph_time(calls: list[Call], repeats: int = 15) -> float:
    """Median microseconds of one of the calls, captured together in a CUDA graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def compile_one(job: tuple[int, dict[str, Any]]) -> str | None:
    """In a forked process: fills Triton's cache on disk."""
    try:
        all_cases()[job[0]].make(0)(**job[1])
        torch.cuda.synchronize()
    except Exception as e:
        return f"{job}: {e!r}"[:200]
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    cases = [(i, c) for i, c in enumerate(all_cases()) if not args.names or any(n in c.name for n in args.names)]
    if args.tune:  # compile in parallel, before this process touches the GPU
        jobs = [(i, kw) for i, c in cases for kw in c.configs]
        with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 14)) as pool:
            for error in filter(None, pool.imap_unordered(compile_one, jobs)):
                print("failed", error)
    for _, case in cases:
        calls = [case.make(seed) for seed in range(case.rotate)]
        calls *= max(32 // len(calls), 1)  # the graph's own launch does not show
        us = graph_time(calls)
        print(f"{case.name:24} {us:9.2f} us {case.rate(us)}   target {case.target or '-'}", flush=True)
        if args.tune and case.configs:
            results = []
            for kw in case.configs:
                try:
                    results.append((graph_time([lambda c=c, kw=kw: c(**kw) for c in calls], 7), kw))
                except Exception as e:
                    print("    failed", kw, repr(e)[:100])
                    torch.cuda.synchronize()
            for us, kw in sorted(results, key=lambda r: r[0])[:8]:
                print(f"    {us:9.2f} us {case.rate(us)}  {kw}", flush=True)
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
