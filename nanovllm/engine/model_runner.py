"""ModelRunner: device memory, the inputs of a step, CUDA graphs, one forward pass with sampling.

A prefill sends the ids to compute and fills the slots of its sequences; a decode takes everything from the slots. On a
GPU it is the replay of one CUDA graph from input ids to sampled ids, captured for some batch sizes; a batch is padded
to the next of them with a row that stores nothing. `launch` returns while the step runs; the ids stay on the device for
the next step and come to the host through a pinned buffer and an event. A CPU runs the same code without graphs. The
KV cache gets what its share of the memory leaves beside weights, the peak of a full step and graphs, all measured.

It knows the sequences of the step it runs and must not know of requests, queues or text. Invariants: all work is on
one stream, in the order of the launches; what a graph reads or writes is allocated once, before it is captured.
"""

from collections.abc import Iterator
from itertools import accumulate
from os.path import commonprefix
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.controls import Controls, Plan, plan_controls
from nanovllm.engine.results import Owner, PendingIds, Pieces, early_stops, most_asked, sampled_rows, scored_rows
from nanovllm.engine.scheduler import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import Slots
from nanovllm.errors import OutOfMemoryError
from nanovllm.kernels._triton import LARGE_PREFILL, compile_ahead
from nanovllm.kernels.step_inputs import decode_inputs
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import make_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models import load_model
from nanovllm.utils.context import Context
from nanovllm.utils.device import exclusive, free_host_bytes, graph_stream, pick_device, pick_dtype, warn_if_slow, zeros
from nanovllm.utils.packing import to_device
from nanovllm.utils.parallel import Parallel

# Without a limit by option, the KV cache of a CPU takes at most this much.
MAX_CPU_CACHE_BYTES = 4 << 30
# Positions of prompts whose logits are computed at a time for log-probabilities.
PROMPT_LOGPROB_ROWS = 256
# Blocks that are copied at a time.
COPIED_BLOCKS = 64


class ModelRunner:
    """One rank: its model, its share of the KV cache, the slots and the graphs.

    Raises `CheckpointError` for a model folder that cannot be used, `OutOfMemoryError` if the device
    is too small; in both cases nothing of the process's state has changed.
    """

    def __init__(self, config: Config, parallel: Parallel | None = None) -> None:
        self.config, self.parallel = config, parallel or Parallel()
        # by batch size and whether a shared prefix is read once
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.device = pick_device(config.device)
        self.is_cuda = self.device.type == "cuda"
        self.dtype = pick_dtype(config, self.device)
        self.backend = make_backend(config.attention_backend, self.device, self.dtype, config.kvcache_block_size)
        if not self.parallel.rank:
            warn_if_slow(config, self.device, self.backend.fits_graphs)
        try:
            with exclusive:
                self._build()
        except (RuntimeError, MemoryError) as error:
            of_device = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            if not of_device and "can't allocate memory" not in str(error):  # what torch says of a CPU
                raise
            raise OutOfMemoryError(
                f"the {self.dtype} model and its activations do not fit the device ({error}); lower "
                "max_num_batched_tokens, max_num_seqs or max_model_len"
            ) from error

    @torch.inference_mode()
    def _build(self) -> None:
        config, hf = self.config, self.config.hf
        self.model = load_model(config, self.parallel, self.dtype, self.device)
        self.sampler = Sampler(self.parallel, self.model.lm_head.start)
        n, max_blocks = config.max_num_seqs, -(-config.max_model_len // config.kvcache_block_size)
        self.slots = Slots(n, max_blocks, self.device)
        self.controls = Controls(self.slots, self.parallel, hf.vocab_size, config.max_model_len)
        self.slots_on_device: list[int] = []  # of the last decode batch, in its order
        self.order: list[int] = []  # the batch entry in each of `rows`
        self.has_min_tokens = self.has_controls = False
        self.owners: list[Owner] = []  # of those in `rows` that want log-probabilities, and where they are
        self.logprob_rows, self.num_logprobs = torch.empty(0, dtype=torch.int32, device=self.device), 0
        self.shared_len = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.reads_shared = False  # whether the sequences in `rows` have `shared_len` keys in common
        # as those of a prefill: other types would be other kernels to compile
        self.rows, self.input_ids, self.positions, self.slot_mapping, self.context_lens = (
            torch.zeros(n, dtype=torch.int32, device=self.device) for _ in range(5)
        )
        self.token_ids = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.logits = torch.zeros(n, self.model.lm_head.num_logits, dtype=self.dtype, device=self.device)
        use_graphs = self.is_cuda and self.backend.fits_graphs and not config.enforce_eager
        self.graph_sizes = _graph_sizes(min(n, config.max_num_batched_tokens)) if use_graphs else []
        if self.is_cuda:
            self.graph_pool = torch.cuda.graph_pool_handle()
            self._allocate_cache(1)
            layers, self.model.layers = self.model.layers, self.model.layers[:2]  # they have the kernels of all
            with compile_ahead(self.device):
                self._rehearse()
            self.model.layers = layers
            self._rehearse()  # initialises what a capture cannot
        self.num_kvcache_blocks = self.parallel.minimum(self._count_blocks(), self.device)
        try:
            self._allocate_cache(self.num_kvcache_blocks)
        except (RuntimeError, MemoryError) as error:  # of a GPU, of a CPU
            raise OutOfMemoryError(
                f"num_kvcache_blocks={self.num_kvcache_blocks}: the KV cache does not fit ({error}); lower it"
            ) from error
        for size in reversed(self.graph_sizes):  # the largest first: the others fit in its memory
            self._capture(size)

    def exit(self) -> None:
        """Free the device memory; the runner cannot be used afterwards."""
        self.graphs.clear()
        for layer in self._attention_layers():
            layer.k_cache = layer.v_cache = torch.empty(0)
        del self.model, self.slots, self.controls
        if self.is_cuda:
            with exclusive:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    # One step

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingIds:
        """Start a step; the ids sampled for the first `num_sampled` sequences follow in the result."""
        if not batch.is_prefill:
            ids, pieces = self.decode(*self._plan_decode(batch))
            return PendingIds(ids, self.order, self.owners, pieces)
        seqs, n = batch.seqs, batch.num_sampled
        sampled = seqs[:n]
        owners, scored = scored_rows(seqs)
        sampled_owners, wanted = sampled_rows(sampled)
        owners += sampled_owners
        k, masked, plan = most_asked(owners), early_stops(sampled), plan_controls(sampled, prefill=True)
        ids, pieces = self.prefill(seqs, n, batch.copies, scored, wanted, k, masked, plan)
        return PendingIds(ids, slice(None), owners, pieces)

    def check(self) -> None:
        """Raise `EngineError` if another rank has failed, so that ids may be rubbish; here there is none."""

    def prefill(
        self, seqs: list[Sequence], n: int, copies: list[tuple[int, int, int]], scored: list[tuple[int, int]],
        wanted: list[int], k: int, masked: list[tuple[int, int]], plan: Plan,
    ) -> tuple[torch.Tensor, Pieces]:  # fmt: skip
        """Compute what is scheduled of `seqs` and sample for the first `n`: ids [n], and log-probabilities.

        copies: (row, source, target) of last blocks that are read from another sequence's.
        scored, wanted, k: log-probabilities of (position, id that follows) and of what rows sample, with k others.
        masked: (row, token id) of what must not be sampled; plan: of the controls.
        """
        self.slots_on_device = []  # a slot may hold another sequence from now on
        input_ids, context, last = self.slots.fill(seqs, n, copies, self.config.kvcache_block_size)
        hidden = self.model(input_ids, context)
        if copies:
            self._copy_blocks(seqs, copies)
        pieces = []
        for i in range(0, len(scored), PROMPT_LOGPROB_ROWS):
            (part,) = to_device([np.array(scored[i : i + PROMPT_LOGPROB_ROWS], dtype=np.int64).T], self.device)
            pieces.append(self.sampler.logprobs(self.model.compute_logits(hidden[part[0]]), part[1], k))
        if not n:
            return self.token_ids[:0], pieces
        logits = self.model.compute_logits(hidden[last])
        if wanted:
            (wanted_rows,) = to_device([np.array(wanted, dtype=np.int32)], self.device)
            raw = logits[wanted_rows]  # a copy: what follows may change `logits`
        self.sampler.rule_out(logits, masked)
        ids = self._sample_into_slots(logits, context.rows[:n], context.context_lens[:n])
        self.controls.load(plan)
        self.controls.resample(logits, ids, context.key_lens)
        if wanted:
            pieces.append(self.sampler.logprobs(raw, ids[wanted_rows], k))
        return ids, pieces

    def _copy_blocks(self, seqs: list[Sequence], copies: list[tuple[int, int, int]]) -> None:
        """Give the sequences of `copies` their own last block, a copy of the one that they have read."""
        moves = [(seqs[i].slot, len(seqs[i].block_table) - 1, source, target) for i, source, target in copies]
        slot, index, source, target = to_device([np.array(moves, dtype=np.int32).T], self.device)[0]
        self.slots.block_tables[slot, index] = target
        for layer in self._attention_layers():
            for cache in (layer.k_cache, layer.v_cache):
                for from_, to in zip(source.split(COPIED_BLOCKS), target.split(COPIED_BLOCKS)):
                    cache[to] = cache[from_]

    def _plan_decode(self, batch: Batch) -> tuple[Any, ...]:
        """The arguments of `decode`, of a size that does not depend on the length of the sequences."""
        seqs = batch.seqs
        slots = [seq.slot for seq in seqs]
        changed = None
        if slots != self.slots_on_device:
            # the longest first: attention ends sooner if the programs that start last have least to do
            self.order = sorted(range(len(seqs)), key=lambda i: -seqs[i].num_cached_tokens)
            shared_blocks = commonprefix([seq.block_table for seq in seqs])  # noqa: RUF071 (of lists)
            shared = len(shared_blocks) * self.config.kvcache_block_size
            in_order = [seqs[i] for i in self.order]
            self.owners, wanted = sampled_rows(in_order)
            changed = (
                [slots[i] for i in self.order], shared, self.backend.reads_shared_prefix(len(seqs), shared),
                wanted, most_asked(self.owners), plan_controls(in_order, prefill=False),
            )  # fmt: skip
            self.has_min_tokens = any(seq.min_tokens for seq in seqs)
            self.has_controls = any(seq.has_controls for seq in seqs)
            self.slots_on_device = slots
        masked = early_stops([seqs[i] for i in self.order]) if self.has_min_tokens else []
        needs_lens = self.has_controls or not self.graph_sizes
        key_lens = [seqs[i].num_cached_tokens + 1 for i in self.order] if needs_lens else []
        return len(seqs), batch.new_blocks, changed, masked, key_lens

    def decode(
        self, n: int, new_blocks: list[tuple[int, int, int]],
        changed: tuple[list[int], int, bool, list[int], int, Plan] | None,
        masked: list[tuple[int, int]], key_lens: list[int],
    ) -> tuple[torch.Tensor, Pieces]:  # fmt: skip
        """One token for each of the `n` sequences on the device: ids [n] in their order there, and log-probabilities.

        changed: their slots, the keys that all share, whether to read those once, which rows want log-probabilities,
        with how many others, and the plan of the controls; `None` if all is as in the last step.
        key_lens: keys of each, those of this step included; empty where nothing needs them.
        """
        size = next((s for s in self.graph_sizes if s >= n), n)
        arrays = [np.array(new_blocks, dtype=np.int32).reshape(-1, 3).T]
        if changed:
            slots, shared, self.reads_shared, wanted, self.num_logprobs, plan = changed
            self.controls.load(plan)
            if self.graph_sizes and (size, self.reads_shared) not in self.graphs:
                try:
                    self._capture(size, self.reads_shared)
                except torch.OutOfMemoryError:  # the plain one gives the same, it only reads more
                    if self.parallel.size > 1:  # other ranks may wait in the middle of the step
                        raise
                    self.graphs[size, self.reads_shared] = self.graphs[size, False]
            rows = slots + [self.slots.padding_row] * (size - n)
            arrays += [np.array(x, dtype=np.int32) for x in (rows, [shared], wanted)]
        if changed or new_blocks:
            (slot, index, block_id), *on_device = to_device(arrays, self.device)
            self.slots.block_tables[slot, index] = block_id
            if on_device:
                self.rows[:size], self.shared_len[:], self.logprob_rows = on_device
        if self.graph_sizes:
            self.graphs[size, self.reads_shared].replay()
        else:
            self._decode_step(n, key_lens)
        if len(self.logprob_rows):
            raw = self.logits[self.logprob_rows]  # a copy: what follows may change `logits`
        if masked:
            self.sampler.rule_out(self.logits, masked)
            self._sample_into_slots(self.logits[:n], self.rows[:n], self.context_lens[:n])
        self.controls.resample(self.logits, self.token_ids, key_lens)
        pieces = []
        if len(self.logprob_rows):
            pieces.append(self.sampler.logprobs(raw, self.token_ids[self.logprob_rows], self.num_logprobs))
        return self.token_ids[:n], pieces

    def _decode_step(self, n: int, key_lens: list[int]) -> None:
        """Decode the sequences in `rows[:n]` from ids to logits and sampled ids, all of it on the device."""
        slots = self.slots
        inputs = (self.input_ids[:n], self.positions[:n], self.slot_mapping[:n], self.context_lens[:n])
        decode_inputs(
            self.rows[:n], slots.last_tokens, slots.context_lens, slots.block_tables,
            self.config.kvcache_block_size, *inputs,
        )  # fmt: skip
        input_ids, positions, slot_mapping, context_lens = inputs
        context = Context(
            False, positions, slot_mapping, slots.block_tables, self.rows[:n], context_lens, key_lens=key_lens,
            shared_len=self.shared_len if self.reads_shared else None,
        )  # fmt: skip
        logits = self.model.compute_logits(self.model(input_ids, context), out=self.logits[:n])
        self._sample_into_slots(logits, self.rows[:n], context_lens)

    def _sample_into_slots(self, logits: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Sample for the slots `rows` [n] what follows their `lens` [n] tokens: ids [n], a part of `token_ids`."""
        slots, out = self.slots, self.token_ids[: len(rows)]
        return self.sampler(logits, slots.temperatures, slots.seeds, lens, rows, slots.last_tokens, out)

    # Memory and graphs

    def _attention_layers(self) -> Iterator[Attention]:
        return (m for m in self.model.modules() if isinstance(m, Attention))

    def _allocate_cache(self, num_blocks: int) -> None:
        # zeros: a kernel may load a whole tile past the end, and 0 * NaN would be NaN
        for layer in self._attention_layers():
            shape = (num_blocks, self.config.kvcache_block_size, layer.num_kv_heads, layer.head_dim)
            layer.backend = self.backend
            layer.k_cache, layer.v_cache = (zeros(shape, self.dtype, self.device) for _ in range(2))

    def _count_blocks(self) -> int:
        """As many blocks as the option says, or as memory allows beside everything else, measured."""
        config = self.config
        if config.num_kvcache_blocks > 0:
            return config.num_kvcache_blocks
        token_bytes = 2 * self.dtype.itemsize * sum(m.num_kv_heads * m.head_dim for m in self._attention_layers())
        block_bytes = token_bytes * config.kvcache_block_size
        if not self.is_cuda:
            longest = self.slots.block_tables.shape[1]
            most = min(free_host_bytes() // 4, MAX_CPU_CACHE_BYTES)
            return max(1, min(most // block_bytes, config.max_num_seqs * longest))
        free = self._free_device_bytes()
        if free < block_bytes:
            raise OutOfMemoryError(
                f"the KV cache needs at least {block_bytes / 2**20:.0f} MiB for one block, and {free / 2**20:.0f} MiB "
                f"are left of {config.gpu_memory_utilization:.0%} of the device's memory after weights, activations "
                "and graphs; raise gpu_memory_utilization, or lower max_num_batched_tokens, "
                "max_num_seqs or kvcache_block_size"
            )
        return free // block_bytes

    def _free_device_bytes(self) -> int:
        """What is left for the cache after weights, the peak of a full step, and the graphs."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._run_prefill(self.config.max_num_batched_tokens, self.config.max_model_len)
        self._decode_padding(self.config.max_num_seqs)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        reserve = 0
        if self.graph_sizes:
            # trial captures: the largest graph needs the pool, each further one little more than its nodes
            left = [torch.cuda.mem_get_info()[0]]
            for size in (self.graph_sizes[-1], self.graph_sizes[0]):
                self._capture(size)
                left.append(torch.cuda.mem_get_info()[0])
            count = 2 * len(self.graph_sizes)  # each size once more for a shared prefix
            reserve = left[0] - left[1] + count * max(left[1] - left[2], 4 << 20)
            self.graphs.clear()
            self.graph_pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        reserve += self.controls.num_bytes
        return int(total * self.config.gpu_memory_utilization) - (total - free) - peak - reserve

    def _rehearse(self) -> None:
        """Call every kernel that requests may need, in each of its variants."""
        most, longest = self.config.max_num_seqs, self.config.max_model_len
        for total, each in ((1, 1), (LARGE_PREFILL, longest), (LARGE_PREFILL, 1)):  # few and many sequences may differ
            self._run_prefill(min(total, self.config.max_num_batched_tokens), each)
        self.controls.rehearse(self.dtype)
        for size in {min(n, most) for n in (1, 2, 4, 8, 16, 32, 64, 80, 128, 256, most)}:
            self._decode_padding(size)
        for size in {min(n, most) for n in (32, 128, most)}:
            self.reads_shared = self.backend.reads_shared_prefix(size, longest)
            self._decode_padding(size)
        self.reads_shared = False

    def _run_prefill(self, total: int, longest: int) -> None:
        """A prefill of `total` tokens with as many samples as there can be, into no cache block."""
        lens = [longest] * (total // longest) + ([total % longest] if total % longest else [])
        device = self.device
        rows = torch.full((len(lens),), self.slots.padding_row, dtype=torch.int32, device=device)
        key_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        position_ids = torch.cat([torch.arange(n, dtype=torch.int32, device=device) for n in lens])
        cu_seqlens = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
        context = Context(
            True, position_ids, torch.full_like(position_ids, -1), self.slots.block_tables, rows, key_lens,
            cu_seqlens, lens, lens,
        )  # fmt: skip
        hidden = self.model(torch.zeros_like(position_ids), context)
        logits = self.model.compute_logits(hidden[: self.config.max_num_seqs])
        n = len(logits)
        ids = self._sample_into_slots(logits, self.rows[:n], position_ids[:n])
        self.sampler.logprobs(logits.clone(), ids, 1)

    def _decode_padding(self, size: int) -> None:
        """A decode step of padding rows only, which compiles and initialises what a capture cannot."""
        self.rows[:size] = self.slots.padding_row
        self._decode_step(size, [1] * size)

    def _capture(self, size: int, reads_shared: bool = False) -> None:
        """Capture the decode step of `size` sequences; all graphs take their memory from one pool."""
        self.reads_shared = reads_shared
        graph = torch.cuda.CUDAGraph()
        with exclusive:
            self._decode_padding(size)
            torch.cuda.synchronize()
            with torch.cuda.stream(graph_stream(self.device)):
                # other threads, as NCCL's own, may go on calling CUDA
                graph.capture_begin(pool=self.graph_pool, capture_error_mode="thread_local")
                try:
                    self._decode_step(size, [])
                finally:
                    graph.capture_end()
        self.graphs[size, reads_shared] = graph


def _graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture, ascending: close together where a padded row costs most; always `most` itself."""
    return [*(s for s in (1, 2, 4, 8) if s < most), *range(16, most, 16), most]
