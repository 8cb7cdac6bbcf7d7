"""Triton for the kernel modules: a stand-in where it is not installed, and help for its CPU interpreter.

Also what several kernels need: cache addresses, launches that overlap, compiling ahead. It must not know of any single
kernel. Invariant: without Triton and without a GPU all modules import, and their references work.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
P = ParamSpec("P")
R = TypeVar("R")


class _Absent:
    """Stands in for triton and triton.language, so that the modules import and their references work."""

    constexpr = int

    def jit(self, fn: Any = None, **_: Any) -> Any:
        return fn or (lambda f: f)


try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform
    triton = tl = _Absent()

try:
    from triton.language.extra.cuda import gdc_wait as _  # noqa: F401

    HAS_PDL = not INTERPRET
except ImportError:  # an older Triton
    HAS_PDL = False

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

# Tokens from which on the GPU is busy for longer than the host with a costly launch, and throughput counts.
LARGE_PREFILL = 2048

INTERPRETED: tl.constexpr = tl.constexpr(INTERPRET)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32 (no tf32). The interpreter multiplies bf16 as raw bits: there, upcast first."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def fast_log2(x):
    """log2 in one instruction; absolute error 2^-22 near 1, relative elsewhere."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def cache_slots(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache slots, int64 [BLOCK_N], of a sequence's keys from start on; those at or past end may be any valid slot."""
    offs = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # one block holds the whole tile
        first = tl.load(table + start // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
        return first + tl.arange(0, BLOCK_N)
    block = tl.load(table + offs // BLOCK_SIZE, mask=offs < end, other=0).to(tl.int64)
    return block * BLOCK_SIZE + offs % BLOCK_SIZE


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Programmatic dependent launch: the next kernel may be launched as soon as all programs of this one have begun."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """This kernel was launched while the one before it still runs: wait for that one's results. To be called before
    anything is read that a kernel before has written: weights may be read earlier, and what is older than the kernel
    before where that one calls `wait_for_inputs`."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """The next kernel starts only now: programs that wait take room from those that work."""
    wait_for_last(PDL)
    let_next_start(PDL)


@functools.lru_cache
def pdl(device: torch.device) -> dict[str, bool]:
    """Options of a launch that waits for its inputs: shorter gaps in a chain of small kernels, on 9.0 and up."""
    if HAS_PDL and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on it."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # torch 2.6 does not say: what every GPU has from Ampere on
    return int(getattr(properties, "shared_memory_per_block_optin", 99 << 10))


def by_device(kernel: Callable[..., R], reference: Callable[P, R]) -> Callable[P, R]:
    """`reference`, by way of `kernel` where the first argument is on a GPU."""

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        x: Any = args[0]
        return (kernel if x.is_cuda else reference)(*args, **kwargs)

    return call


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Within it, kernels that this thread calls get compiled in parallel and do not run: a rehearsal of what will run.
    One thread at a time.

    Saves seconds at the first start on a machine. Triton versions without asynchronous compilation run the kernels.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        here = active_mode.get() is not None  # what other threads call runs
        return run(kernel, *args, warmup=warmup or here, **options)

    class Pool(ThreadPoolExecutor):
        """The launcher, too, in the same task: it is compiled when it is first asked for."""

        def submit(self, compile_kernel: Any) -> Any:  # type: ignore[override]
            def task() -> Any:
                kernel = compile_kernel()
                kernel.run  # noqa: B018
                return kernel

            return super().submit(task)

    with Pool(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        JITFunction.run = compile_only
        try:
            with AsyncCompileMode(pool):
                yield
        finally:
            JITFunction.run = run
            active_mode.set(None)  # an error leaves it set in Triton 3.6


NUM_COUNTERS = 1 << 16


@functools.lru_cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """[NUM_COUNTERS] int32, zero between kernels, with which programs find out who is last; kernels of one device must
    not overlap. To be called once outside of a capture."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
