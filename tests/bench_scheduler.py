"""Host cost of one decode step, in scheduler, block manager and postprocess, without a model.

    python tests/bench_scheduler.py

Prints the median and the 99th percentile of 1,000 steps.
"""

from statistics import median
from time import perf_counter
from types import SimpleNamespace

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 256
NUM_STEPS = 1000


def bench(num_seqs: int, num_blocks_each: int, stop_ids: bool) -> tuple[float, float]:
    """Median and 99th percentile, in µs, of a decode step of `num_seqs` sequences of `num_blocks_each` blocks."""
    Sequence.block_size = BLOCK_SIZE
    length = num_blocks_each * BLOCK_SIZE
    config = SimpleNamespace(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * length,
        max_model_len=length + 4 * NUM_STEPS,
        kvcache_block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    scheduler = Scheduler(config, num_seqs * (num_blocks_each + 8), eos_ids=[2])  # type: ignore[arg-type]
    for i in range(num_seqs):
        # uneven lengths, so that every step has a few sequences that need a block
        seq = Sequence([i] * (length - 1 - i * 7 % BLOCK_SIZE), SamplingParams(max_tokens=2 * NUM_STEPS))
        scheduler.check(seq)
        if stop_ids:
            seq.stop_ids = scheduler.eos_ids
        scheduler.add(seq)
    token_ids = [1] * num_seqs

    def step() -> float:
        start = perf_counter()
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.advance(batch)
        scheduler.postprocess(batch, token_ids)
        return 1e6 * (perf_counter() - start)

    while scheduler.waiting:
        step()
    times = sorted(step() for _ in range(NUM_STEPS))
    assert scheduler.num_preemptions == 0 and len(scheduler.running) == num_seqs
    return median(times), times[NUM_STEPS * 99 // 100]


def main() -> None:
    for num_seqs, num_blocks_each, bar in ((256, 4, 150), (512, 160, 400)):
        for stop_ids in (False, True):
            middle, slow = bench(num_seqs, num_blocks_each, stop_ids)
            kind = "end token possible" if stop_ids else "length stop only"
            print(
                f"{num_seqs} sequences of {num_blocks_each} blocks, {kind}: "
                f"{middle:.0f} µs a step (99 %: {slow:.0f} µs; bar: {bar} µs)"
            )


if __name__ == "__main__":
    main()
