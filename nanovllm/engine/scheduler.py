"""Scheduler: who runs in the next step; it knows sequences and blocks, nothing of torch or devices.

A step is either a prefill (prompts, whole or in chunks) or a decode (one token for every running sequence). While there
is room, prefills come first, up to 16 in a row; once there is none, prompts are admitted in groups, so that newcomers
do not stall all others one by one, and only when the blocks that the running ones are expected to need still fit: a
pool that fills only to preempt at the next step is slower than a shorter queue of running sequences. If the pool runs
empty after all, the youngest is preempted: it keeps its ids, gives its blocks back, waits first in line and is computed
again.

Requests wait in the order in which they came, but of those that came between two steps what may take longest is first:
otherwise a long job ends with few sequences running, at a fraction of the speed.

With overlap a step is scheduled while the one before still runs. What it assumes is only that no sequence of that step
stops early; `advance` books what is certain at launch, `postprocess` what is known when the ids arrive.

Invariants: a sequence is in exactly one of `waiting`, `running` or finished; only the first waiting sequence can own
blocks (a prompt between two chunks); blocks are released in `_release` alone, but for `reset`, which forgets all.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus

# A waiting request that may fit because others have left is tried at the latest after so many steps.
MAX_ADMISSION_DELAY = 16
# Running sequences get a step at the latest after so many prefills, however many newcomers there are.
MAX_PREFILLS_IN_A_ROW = 16
# A warning comes after so many preemptions and one for every fourth request that has finished.
MANY_PREEMPTIONS = 32


@dataclass(slots=True)
class Batch:
    """What one step runs.

    num_sampled: the first so many of `seqs` sample a token; only the last of a prefill can be a chunk that does not.
    new_blocks: (slot, index in the block table, block id) of the blocks added for a decode step.
    copies: (entry of `seqs`, block to read, its own block) of prefills that compute only the last token of a prompt
        whose K/V another sample has, or stores in this step. Such a sequence stores nothing: it reads its last
        block from the other one and gets a copy of it when the step has run.
    """

    seqs: list[Sequence]
    is_prefill: bool
    num_sampled: int
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: Config, num_blocks: int, eos_ids: Iterable[int] = ()) -> None:
        self.config, self.num_blocks, self.block_size = config, num_blocks, config.kvcache_block_size
        # a decode step has a token of every running sequence, and that limit holds for it as well
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.eos_ids = frozenset(eos_ids)
        self.reset()
        # Counters since start, for `stats`.
        self.num_preemptions = self.num_prompt_tokens = self.num_hit_tokens = self.num_generated_tokens = 0
        self.patience: float = MANY_PREEMPTIONS
        self.mean_completion: float | None = None

    def reset(self, seqs: Iterable[Sequence] = ()) -> None:
        """Empty, whatever a change that was cut short has left; `seqs`, all that had not finished, are aborted."""
        for seq in seqs:
            if not seq.is_finished:
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"
            seq.block_table, seq.slot = [], -1
        self.block_manager = BlockManager(self.num_blocks, self.block_size, self.config.enable_prefix_caching)
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.arrived: list[Sequence] = []  # since the last step was scheduled
        self.running: dict[int, Sequence] = {}
        self.free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        # Admission: `full` once a prompt did not fit, until one that left makes another try worthwhile.
        self.full = False
        self.num_left = self.admission_delay = 0
        self.num_prefills = 0  # since the last decode
        self.reserved_blocks = 0  # what the running sequences hold at their longest, nothing shared

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def check(self, seq: Sequence) -> None:
        """`ValueError` if `seq` could never run, however empty the engine is."""
        capacity, max_model_len = self.num_blocks * self.block_size, self.config.max_model_len
        limit = min(max_model_len - 1, capacity)
        if seq.num_tokens > limit:
            raise ValueError(
                f"prompt of {seq.num_tokens} tokens: must be at most {limit} (max_model_len={max_model_len} "
                f"bounds prompt and completion together; the KV cache holds {capacity} tokens)"
            )
        # It may outgrow the limits later and ends there; the K/V of the last sampled token are never needed.
        seq.max_num_tokens = min(seq.max_num_tokens, max_model_len, capacity + 1)

    def add(self, seq: Sequence) -> None:
        """Queue a request that `check` has passed."""
        self.waiting[seq.seq_id] = seq
        self.arrived.append(seq)

    def abort(self, seq: Sequence) -> None:
        """End a request that has not finished; what it was given so far stays in it."""
        if not seq.is_finished:
            self._finish(seq, "abort")

    # One step

    def schedule(self) -> Batch | None:
        """What to run next, or `None` if nothing can run before a step in flight has ended."""
        for seq in sorted(self.arrived, key=lambda seq: seq.num_tokens - seq.max_num_tokens):
            if seq.seq_id in self.waiting:
                self.waiting.move_to_end(seq.seq_id)
        self.arrived.clear()
        may_prefill = self.num_prefills < MAX_PREFILLS_IN_A_ROW or not self.running
        batch = self._schedule_prefill() if may_prefill else None
        self.num_prefills = self.num_prefills + 1 if batch else 0
        return batch or self._schedule_decode()

    def advance(self, batch: Batch) -> None:
        """Book what a launched step is certain to do, so that the next one can be scheduled."""
        for seq in batch.seqs:
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
        for seq in batch.seqs[: batch.num_sampled]:
            seq.num_pending += 1
            seq.is_prefill = False

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Append the sampled ids of a step and return the sequences that ended with it.

        A sequence that ended or was aborted while the step ran gets nothing; one that was preempted
        meanwhile gets its token.
        """
        finished: list[Sequence] = []
        block_size, done = self.block_size, SequenceStatus.FINISHED
        self.num_generated_tokens += batch.num_sampled
        for seq, token_id in zip(batch.seqs, token_ids):
            if seq.status is done:
                self.num_generated_tokens -= 1
                continue
            seq.num_pending -= 1
            seq.token_ids.append(token_id)
            seq.last_token = token_id
            seq.num_tokens = num_tokens = seq.num_tokens + 1
            if num_tokens % block_size == 1 and seq.block_table:
                # the ids before this one are known, their K/V written: the block they fill can be shared
                self.block_manager.register(seq, num_tokens - 1)
            if (token_id in seq.stop_ids or seq.stop_strings) and self._stops(seq, token_id):
                finished.append(seq)
            elif num_tokens >= seq.max_num_tokens:
                self._finish(seq, "length")
                finished.append(seq)
        return finished

    # Prefill

    def _schedule_prefill(self) -> Batch | None:
        if not self.waiting or not self._admission_is_due():
            return None
        self.full, self.num_left, self.admission_delay = False, 0, 0
        budget = self.config.max_num_batched_tokens
        batch = Batch([], True, 0)
        while self.waiting and budget:
            seq = next(iter(self.waiting.values()))
            if not seq.block_table and not self._admit(seq, batch):
                self.full = True
                break
            seq.num_scheduled_tokens = min(budget, seq.num_tokens - seq.num_cached_tokens)
            budget -= seq.num_scheduled_tokens
            batch.seqs.append(seq)
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            self.block_manager.register(seq, end)
            if end < seq.num_tokens:
                break
            del self.waiting[seq.seq_id]
            self.running[seq.seq_id] = seq
            seq.status = SequenceStatus.RUNNING
            batch.num_sampled += 1
        return batch if batch.seqs else None

    def _admission_is_due(self) -> bool:
        """At once while there is room; else when a group has left, or after a bounded delay."""
        if not self.full or not self.running or next(iter(self.waiting.values())).block_table:
            return True
        if not self.num_left:
            return False
        self.admission_delay += 1
        group = min(len(self.waiting), max(1, len(self.running) // 16))
        return self.num_left >= group or self.admission_delay >= MAX_ADMISSION_DELAY

    def _admit(self, seq: Sequence, batch: Batch) -> bool:
        if not self.free_slots or seq.num_pending:
            return False
        is_new = not seq.num_completion_tokens
        other = next((s for s in seq.samples if is_new and s.seq_id in self.running), None)
        if other:
            prefix = other.block_table[: seq.num_tokens // self.block_size]
        elif is_new and seq.num_prompt_logprobs is not None:
            prefix = []  # log-probabilities need the hidden state of every position
        else:
            prefix = self.block_manager.find_prefix(seq)
        free_blocks = self.block_manager.num_free_after(prefix, seq.num_tokens)
        if free_blocks < 0 or (self.running and not self._growth_fits(seq, prefix, free_blocks)):
            return False
        self.block_manager.allocate(seq, prefix)
        if other:
            seq.num_cached_tokens = seq.num_tokens - 1
            last = seq.num_cached_tokens // self.block_size
            batch.copies.append((len(batch.seqs), other.block_table[last], seq.block_table[last]))
        self.reserved_blocks += self._most_blocks(seq)
        seq.slot = self.free_slots.pop()
        if is_new:
            seq.num_hit_tokens = seq.num_cached_tokens
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_hit_tokens += seq.num_hit_tokens
        return True

    def _growth_fits(self, newcomer: Sequence, prefix: list[int], free_blocks: int) -> bool:
        """The watermark: can the running sequences and `newcomer` all reach their expected ends?

        Each takes a block every `block_size` steps and gives its own back one step after its end, a
        shared one with the last end; the need is checked at every end, where it peaks.
        """
        if self.reserved_blocks + self._most_blocks(newcomer) <= self.num_blocks:
            return True
        size = self.block_size
        seqs = (*self.running.values(), newcomer)
        held = np.array([len(seq.block_table) for seq in seqs])
        tokens = np.array([seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs])
        held[-1], tokens[-1] = -(-newcomer.num_tokens // size), newcomer.num_tokens
        left = np.array([self._expected_num_tokens(seq) for seq in seqs]) - 1 - tokens
        tables, last_owner = [*(seq.block_table for seq in self.running.values()), prefix], {}
        for i in left.argsort(kind="stable"):
            last_owner.update(dict.fromkeys(tables[i], i))
        own = np.bincount(list(last_owner.values()), minlength=len(seqs))
        own[-1] += held[-1] - len(prefix)
        now = left[:, None] + 1
        needed = np.where(left + 1 >= now, -(-(tokens + now) // size) - held, -own).sum(axis=1)
        return bool((needed <= free_blocks).all())

    def _most_blocks(self, seq: Sequence) -> int:
        return -(-(seq.max_num_tokens - 1) // self.block_size)

    def _expected_num_tokens(self, seq: Sequence) -> int:
        """Length at which `seq` will probably end: exact if only its length can stop it."""
        limit = seq.max_num_tokens
        if not seq.stop_ids and not seq.stop_strings:
            return limit
        mean = self.mean_completion
        completion = (limit - seq.num_prompt_tokens) // 2 if mean is None else int(mean)
        return min(limit, max(seq.num_prompt_tokens + completion, seq.num_tokens + self.block_size))

    # Decode

    def _schedule_decode(self) -> Batch | None:
        batch = Batch([], False, 0)
        block_size = self.block_size
        for seq in list(self.running.values()):
            if seq.slot < 0:
                break  # it and all younger ones were preempted just now
            if seq.num_tokens + seq.num_pending >= seq.max_num_tokens:
                continue  # its last token is in flight
            if seq.num_cached_tokens == len(seq.block_table) * block_size and not self._grow(seq, batch):
                break  # it was the youngest left and gave its own blocks
            seq.num_scheduled_tokens = 1
            batch.seqs.append(seq)
        batch.num_sampled = len(batch.seqs)
        return batch if batch.seqs else None

    def _grow(self, seq: Sequence, batch: Batch) -> bool:
        """Add a block to `seq`, preempting from the youngest on; false if that is `seq` itself."""
        while not self.block_manager.free:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is seq:
                return False
        self.block_manager.append_block(seq)
        batch.new_blocks.append((seq.slot, len(seq.block_table) - 1, seq.block_table[-1]))
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.patience -= 1
        if self.patience < 0:
            self.patience = math.inf
            warnings.warn(
                f"{self.num_preemptions} preemptions: the KV cache of {self.num_blocks} blocks is too small for what "
                "runs, which is slow; raise num_kvcache_blocks or gpu_memory_utilization, or lower max_num_seqs",
                stacklevel=2,
            )
        self.block_manager.register(seq, seq.num_cached_tokens)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.is_prefill = True
        self.waiting[seq.seq_id] = seq
        self.waiting.move_to_end(seq.seq_id, last=False)
        self.full = True

    # Ends

    def _stops(self, seq: Sequence, token_id: int) -> bool:
        """End `seq` if its newest token or the text so far asks for it."""
        stop: int | str | None = None
        if seq.stop_strings:
            seq.detokenizer.append(token_id)
            stop = seq.detokenizer.find(seq.stop_strings)  # one that comes too early is passed over for good
        if seq.num_completion_tokens < seq.min_tokens:
            return False
        if token_id in seq.stop_ids:
            stop = None if token_id in self.eos_ids and not seq.ignore_eos else token_id
        elif not stop:
            return False
        self._finish(seq, "stop", stop)
        return True

    def _finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if reason != "abort":
            self.patience += 0.25
            mean, length = self.mean_completion, seq.num_completion_tokens
            self.mean_completion = length if mean is None else mean + (length - mean) / 32
        if self.waiting.pop(seq.seq_id, None) is not None:
            self.full = False  # the one behind it may fit
        if seq.slot >= 0:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """The one place where blocks and slot come back: a step in flight may still write to them,
        but whatever gets them next is launched after it."""
        self.running.pop(seq.seq_id, None)
        self.block_manager.release(seq)
        self.reserved_blocks -= self._most_blocks(seq)
        self.free_slots.append(seq.slot)
        seq.slot = -1
        self.num_left += 1
