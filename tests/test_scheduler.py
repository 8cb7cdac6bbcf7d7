"""Scheduler and BlockManager under a fake runner that models the KV cache exactly.

The fake runner keeps, for every position of every block, a hash of the prefix whose K/V was written
there, and the slots of a device. Each launch checks that everything a sequence attends to is its own
prefix, and samples a token that depends on the whole prefix, so that a token that is lost, doubled
or misplaced changes all that follow.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

VOCAB = 50
EOS = 49


def chain(state: int, token_id: int) -> int:
    """The content of a position: everything up to and including its token."""
    return hash((state, token_id))


def sample(state: int) -> int:
    return state % VOCAB


def answer(prompt: list[int], max_tokens: int, stop_ids: frozenset[int], min_tokens: int = 0) -> list[int]:
    """What a request must get, computed without an engine."""
    state, out = 0, []
    for token_id in prompt:
        state = chain(state, token_id)
    while len(out) < max_tokens:
        out.append(sample(state))
        if out[-1] in stop_ids and len(out) >= min_tokens:
            break
        state = chain(state, out[-1])
    return out


@pytest.fixture(autouse=True)
def restore_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "block_size", Sequence.block_size)


class FakeRunner:
    """A device: `kv[block]` holds the content of each position; slots as the engine's runner keeps them."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.kv: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.last_tokens = [-1] * num_slots
        self.context_lens = [-1] * num_slots
        self.block_tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.ids: dict[int, list[int]] = {}  # of each sequence: the prompt and all that was sampled for it
        self.states: dict[int, list[int]] = {}  # the content of each position of `ids`
        self.num_sampled: Counter[int] = Counter()
        self.scored: dict[int, list[int]] = {}  # positions computed for log-probabilities of the prompt
        self.num_computed = 0

    def append(self, seq_id: int, token_id: int) -> None:
        states = self.states.setdefault(seq_id, [])
        self.ids.setdefault(seq_id, []).append(token_id)
        states.append(chain(states[-1] if states else 0, token_id))

    def launch(self, batch: Batch) -> list[int]:
        for slot, index, block_id in batch.new_blocks:
            assert len(self.block_tables[slot]) == index, "a block was skipped or sent twice"
            self.block_tables[slot].append(block_id)
        copied = {row: (source, target) for row, source, target in batch.copies}
        for row, seq in enumerate(batch.seqs):  # all K/V of a step are stored before any is read
            start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            ids, states, slot = self.ids[seq.seq_id], self.states[seq.seq_id], seq.slot
            if batch.is_prefill:
                self.block_tables[slot] = list(seq.block_table)
                assert seq.token_ids[start:end] == ids[start:end], "a token was lost, doubled or misplaced"
            else:
                assert (self.context_lens[slot], self.last_tokens[slot], start + 1) == (start, ids[start], end)
            assert self.block_tables[slot] == seq.block_table, "the device has another block table"
            if batch.is_prefill and seq.num_prompt_logprobs is not None and not seq.num_completion_tokens:
                self.scored.setdefault(seq.seq_id, []).extend(range(start, end))
            if row in copied:
                assert end - start == 1 and seq.block_table[-1] == copied[row][1]
            for position in range(start, end if row not in copied else start):
                block_id = seq.block_table[position // self.block_size]
                self.kv[block_id][position % self.block_size] = states[position]
            self.num_computed += end - start
        contents = [(target, list(self.kv[source])) for source, target in copied.values()]
        for target, content in contents:
            self.kv[target] = content
        sampled = []
        for row, seq in enumerate(batch.seqs):
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            states = self.states[seq.seq_id]
            for i, first in enumerate(range(0, end, self.block_size)):
                n = min(self.block_size, end - first)
                content = self.kv[seq.block_table[i]][:n]
                assert content == states[first : first + n], f"block {i} holds something else than the prefix"
            self.context_lens[seq.slot] = end
            if row < batch.num_sampled:
                assert end == len(states), "a token was sampled from the middle of a sequence"
                self.num_sampled[seq.seq_id] += 1
                self.last_tokens[seq.slot] = token_id = sample(states[-1])
                self.append(seq.seq_id, token_id)
                sampled.append(token_id)
        return sampled


@dataclass
class Engine:
    """The loop of the real engine around a scheduler and a fake runner; checks every invariant at every step."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 200
    enable_prefix_caching: bool = True
    depth: int = 0  # steps that are in flight while the next is scheduled
    one_by_one: bool = False  # requests are queued as if a step came between any two
    seqs: list[Sequence] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        Sequence.block_size = self.block_size
        config = SimpleNamespace(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            kvcache_block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config, self.num_blocks, [EOS])  # type: ignore[arg-type]
        self.runner = FakeRunner(self.num_blocks, self.block_size, self.max_num_seqs)
        self.in_flight: deque[tuple[Batch, list[int]]] = deque()
        self.batches: list[list[tuple[int, int]]] = []  # (seq_id, tokens) of each step
        self.num_schedules = 0
        self.arrivals: dict[int, int] = {}  # of each request, how often had been scheduled before it came

    def add(
        self, prompt: list[int], max_tokens: int | None = 8, stop_ids: list[int] | None = None, **p: Any
    ) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **p})
        samples = [Sequence(prompt, params) for _ in range(params.n)]
        for seq in samples:
            seq.samples = samples if params.n > 1 else []
            seq.num_prompt_logprobs = params.prompt_logprobs if seq is samples[0] else None
            self.scheduler.check(seq)
            seq.stop_ids = frozenset(stop_ids or ()) | (frozenset() if params.ignore_eos else self.scheduler.eos_ids)
            self.scheduler.add(seq)
            self.seqs.append(seq)
            self.arrivals[seq.seq_id] = self.num_schedules
            if self.one_by_one:
                self.scheduler.arrived.clear()
                self.num_schedules += 1
            for token_id in prompt:
                self.runner.append(seq.seq_id, token_id)
        return samples[0]

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
        self.check_blocks()

    def step(self) -> list[Sequence]:
        scheduler = self.scheduler
        batch = scheduler.schedule()
        self.num_schedules += 1
        if batch is not None:
            self.check_batch(batch)
            self.in_flight.append((batch, self.runner.launch(batch)))
            scheduler.advance(batch)
            self.num_steps += 1
            for seq in batch.seqs:
                assert seq.num_scheduled_tokens == 0
                if seq.seq_id not in self.started:
                    self.started.append(seq.seq_id)
        else:
            assert self.in_flight, "requests are left and nothing can run"
        finished = []
        while len(self.in_flight) > (self.depth if batch else 0):
            finished += scheduler.postprocess(*self.in_flight.popleft())
        assert all(seq.is_finished for seq in finished)
        self.finished += [seq.seq_id for seq in finished]
        self.check_blocks()
        return finished

    def run(self) -> None:
        while not self.scheduler.is_finished():
            self.step()

    def check_batch(self, batch: Batch) -> None:
        seqs, scheduler = batch.seqs, self.scheduler
        assert seqs and len({seq.seq_id for seq in seqs}) == len(seqs), "scheduled twice"
        assert sum(seq.num_scheduled_tokens for seq in seqs) <= self.max_num_batched_tokens
        assert all(seq.num_scheduled_tokens > 0 and not seq.is_finished for seq in seqs)
        assert len(seqs) - batch.num_sampled <= int(batch.is_prefill)
        assert all(seq.is_prefill is batch.is_prefill for seq in seqs)
        for row, seq in enumerate(seqs):
            complete = row < batch.num_sampled
            assert (seq.status is SequenceStatus.RUNNING) is complete
            assert (seq.seq_id in scheduler.running) is complete
        self.batches.append([(seq.seq_id, seq.num_scheduled_tokens) for seq in seqs])

    def check_blocks(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        assert not scheduler.waiting.keys() & scheduler.running.keys()
        owners = [seq for seq in (*scheduler.running.values(), *scheduler.waiting.values()) if seq.block_table]
        assert len(owners) <= self.max_num_seqs and len(scheduler.running) <= self.max_num_seqs
        slots = [seq.slot for seq in owners]
        assert sorted(slots + scheduler.free_slots) == list(range(scheduler.max_num_seqs))
        assert all(seq.slot < 0 for seq in self.seqs if not seq.block_table)
        counts = Counter(block_id for seq in owners for block_id in seq.block_table)
        assert [block.ref_count for block in manager.blocks] == [counts[i] for i in range(self.num_blocks)]
        assert set(manager.free) == set(range(self.num_blocks)) - counts.keys()
        content: dict[int, list[int]] = {}
        for seq in owners:
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert seq.num_cached_tokens <= len(seq.block_table) * self.block_size
            assert seq.num_cached_tokens <= seq.num_tokens and seq.num_pending in (0, 1)
            if not seq.is_prefill:
                assert seq.num_cached_tokens == seq.num_tokens - 1 + seq.num_pending
            for i, block_id in enumerate(seq.block_table):
                if counts[block_id] > 1:
                    end = (i + 1) * self.block_size
                    assert end <= seq.num_cached_tokens, "a block is shared that this sequence may write to"
                    ids = seq.token_ids[:end]
                    assert content.setdefault(block_id, ids) == ids, "a block is shared by different prefixes"
        most = sum(-(-(seq.max_num_tokens - 1) // self.block_size) for seq in owners)
        assert scheduler.reserved_blocks == most

    def check_end(self) -> None:
        """All is back, and every request has exactly its answer."""
        scheduler, runner = self.scheduler, self.runner
        assert not scheduler.waiting and not scheduler.running and scheduler.reserved_blocks == 0
        assert len(scheduler.block_manager.free) == self.num_blocks
        assert sorted(scheduler.free_slots) == list(range(scheduler.max_num_seqs))
        aborted = {seq.seq_id for seq in self.seqs if seq.finish_reason == "abort"}
        assert sorted(self.finished) == sorted(seq.seq_id for seq in self.seqs if seq.seq_id not in aborted)
        for seq in self.seqs:
            most = seq.max_num_tokens - seq.num_prompt_tokens
            expected = answer(seq.prompt_token_ids, most, seq.stop_ids, seq.min_tokens)
            got = seq.completion_token_ids
            assert seq.is_finished and seq.num_tokens == len(seq.token_ids) and seq.last_token == seq.token_ids[-1]
            if seq.finish_reason == "abort":
                assert got == expected[: len(got)]
                continue
            assert got == expected
            stopped = got[-1] in seq.stop_ids and len(got) >= seq.min_tokens
            assert seq.finish_reason == ("stop" if stopped else "length")
            if seq.num_prompt_logprobs is not None:
                assert runner.scored[seq.seq_id] == list(range(seq.num_prompt_tokens)), "a position missing or twice"
            wasted = runner.num_sampled[seq.seq_id] - len(got)
            early = stopped and len(got) < most
            assert 0 <= wasted <= (self.depth if early else 0), "rows computed for nothing"
        generated = sum(seq.num_completion_tokens for seq in self.seqs)
        assert scheduler.num_generated_tokens == generated
        came = [self.arrivals[seq_id] for seq_id in self.started]
        assert came == sorted(came), "overtaken by a later one"
        most = {seq.seq_id: seq.max_num_tokens - seq.num_prompt_tokens for seq in self.seqs}
        for _, together in groupby(self.started, self.arrivals.__getitem__):
            lengths = [most[seq_id] for seq_id in together]
            assert lengths == sorted(lengths, reverse=True), "a longer one came with a shorter one and started later"
        # every admission yields a token before its sequence can be preempted: nothing can starve
        assert scheduler.num_preemptions <= generated + len(self.seqs)
        chunks = 1 + self.max_model_len // self.max_num_batched_tokens
        admissions = len(self.seqs) + scheduler.num_preemptions
        assert self.num_steps <= sum(runner.num_sampled.values()) + admissions * chunks


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def stop_at(prompt: list[int], position: int) -> int:
    """A stop id that ends the answer to `prompt` at the first place from `position` on where that is possible."""
    out = answer(prompt, 100, frozenset())
    return next(token for i, token in enumerate(out) if i >= position and token not in out[:i])


# Prefill


def test_one_request_gets_its_answer() -> None:
    engine = Engine()
    seq = engine.add(ids(10), 8)
    engine.run()
    engine.check_end()
    assert engine.batches == [[(seq.seq_id, 10)]] + [[(seq.seq_id, 1)]] * 7


def test_waiting_prompts_are_prefilled_together() -> None:
    engine = Engine()
    seqs = [engine.add(ids(10, i)) for i in range(4)]
    engine.step()
    assert engine.batches == [[(seq.seq_id, 10) for seq in seqs]]
    assert all(seq.status is SequenceStatus.RUNNING for seq in seqs)


def test_the_longest_of_those_that_came_together_is_first_and_none_overtakes_those_that_waited() -> None:
    engine = Engine(max_num_seqs=1)
    together = [engine.add(ids(5, i), max_tokens) for i, max_tokens in enumerate((3, 9, 4, 9))]
    engine.step()
    later = engine.add(ids(5), 20)
    engine.run()
    short, long, middle, other_long = (seq.seq_id for seq in together)
    assert engine.started == [long, other_long, middle, short, later.seq_id]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=16)
    seq = engine.add(ids(40), 3)
    statuses = []
    for _ in range(3):
        engine.step()
        statuses.append(seq.status)
    assert [batch[0][1] for batch in engine.batches] == [16, 16, 8]
    assert statuses == [SequenceStatus.WAITING, SequenceStatus.WAITING, SequenceStatus.RUNNING]
    engine.run()
    engine.check_end()


def test_a_chunk_fills_what_the_prompts_before_it_leave_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=16)
    first, second, third = (engine.add(ids(10, i)) for i in range(3))
    engine.step()
    engine.step()
    assert engine.batches == [
        [(first.seq_id, 10), (second.seq_id, 6)],
        [(second.seq_id, 4), (third.seq_id, 10)],
    ]
    engine.run()
    engine.check_end()


def test_running_is_set_when_the_last_chunk_is_scheduled() -> None:
    engine = Engine(max_num_batched_tokens=16)
    seq = engine.add(ids(20))
    engine.step()
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.num_sampled == 1
    assert seq.status is SequenceStatus.RUNNING and seq.is_prefill and seq.num_cached_tokens == 16


def test_identical_prompts_of_one_step_share_their_blocks() -> None:
    engine = Engine()
    seqs = [engine.add(ids(10)) for _ in range(4)]
    engine.step()
    assert engine.batches == [[(seqs[0].seq_id, 10), *((seq.seq_id, 2) for seq in seqs[1:])]]
    assert all(seq.block_table[:2] == seqs[0].block_table[:2] for seq in seqs)
    assert [seq.num_hit_tokens for seq in seqs] == [0, 8, 8, 8] and engine.scheduler.num_hit_tokens == 24
    engine.run()
    engine.check_end()


def test_identical_prompts_share_nothing_without_prefix_caching() -> None:
    engine = Engine(enable_prefix_caching=False)
    for _ in range(4):
        engine.add(ids(10))
    engine.run()
    engine.check_end()
    assert [n for _, n in engine.batches[0]] == [10] * 4 and engine.scheduler.num_hit_tokens == 0


def test_a_later_turn_finds_prompt_and_answer_of_the_turn_before() -> None:
    for num_tokens in (7, 8, 9, 10):  # K/V are there for all but the last of them
        for depth in (0, 1):
            engine = Engine(depth=depth)
            first = engine.add(ids(5), num_tokens - 5)
            engine.run()
            second = engine.add([*first.token_ids, *ids(4, 1)])
            engine.run()
            engine.check_end()
            assert second.num_hit_tokens == (num_tokens - 1) // 4 * 4


def test_a_turn_after_a_stop_id_finds_all_full_blocks() -> None:
    for stop in range(3, 8):
        prompt = ids(5)
        engine = Engine()
        first = engine.add(prompt, 60, [stop_at(prompt, stop)])
        engine.run()
        second = engine.add([*first.token_ids, 1])
        engine.run()
        assert second.num_hit_tokens == (first.num_tokens - 1) // 4 * 4
        engine.check_end()


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_and_then_shared() -> None:
    engine = Engine()
    engine.add(ids(10))
    scored = engine.add(ids(10), prompt_logprobs=0)
    later = engine.add(ids(10))
    engine.run()
    engine.check_end()
    assert [n for _, n in engine.batches[0]] == [10, 10, 2]
    assert (scored.num_hit_tokens, later.num_hit_tokens) == (0, 8)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
def test_samples_join_in_the_step_of_their_prompt_and_compute_one_token_each(
    num_prompt_tokens: int, caching: bool
) -> None:
    engine = Engine(enable_prefix_caching=caching)
    first = engine.add(ids(num_prompt_tokens), 5, n=3)
    engine.step()
    assert [n for _, n in engine.batches[0]] == [num_prompt_tokens, 1, 1]
    full = num_prompt_tokens // 4
    tables = [seq.block_table for seq in first.samples]
    assert all(table[:full] == tables[0][:full] for table in tables)
    assert len({table[-1] for table in tables}) == (1 if num_prompt_tokens % 4 == 0 else 3)
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_that_have_to_wait_join_a_running_one(depth: int) -> None:
    engine = Engine(max_num_seqs=2, depth=depth, enable_prefix_caching=False, one_by_one=True)
    engine.add(ids(3, 1), 3)
    first = engine.add(ids(10), 9, n=3)
    engine.run()
    engine.check_end()
    assert [seq.num_hit_tokens for seq in first.samples] == [0, 9, 9]  # the third joins the second


# Limits


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_than_max_num_seqs_run(depth: int) -> None:
    engine = Engine(max_num_seqs=4, depth=depth)
    for i in range(40):
        engine.add(ids(5, i), 3 + i % 5)
    most = 0
    while not engine.scheduler.is_finished():
        engine.step()
        most = max(most, len(engine.scheduler.running))
    engine.check_end()
    assert most == 4 and max(map(len, engine.batches)) == 4


def test_decode_keeps_the_token_limit_of_a_step() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=3)
    for i in range(8):
        engine.add(ids(5, i), 6)
    engine.run()
    engine.check_end()
    assert max(sum(n for _, n in batch) for batch in engine.batches) == 3


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "limit"), [(5, 200, 20), (64, 30, 29), (5, 21, 20), (5, 20, 19), (1, 200, 4)]
)
def test_a_prompt_that_can_never_fit_is_refused(num_blocks: int, max_model_len: int, limit: int) -> None:
    engine = Engine(num_blocks=num_blocks, max_model_len=max_model_len)
    with pytest.raises(ValueError, match=rf"prompt of {limit + 1} tokens: must be at most {limit} "):
        engine.add(ids(limit + 1))
    assert engine.scheduler.is_finished()
    seq = engine.add(ids(limit), None)
    engine.run()
    engine.check_end()
    assert seq.finish_reason == "length" and seq.num_completion_tokens == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_blocks", "max_model_len", "most"), [(5, 200, 21), (64, 30, 30), (5, 15, 15)])
def test_a_request_that_outgrows_the_engine_ends_by_length(
    depth: int, num_blocks: int, max_model_len: int, most: int
) -> None:
    engine = Engine(num_blocks=num_blocks, max_model_len=max_model_len, depth=depth)
    seqs = [engine.add(ids(6, i), None) for i in range(3)]
    engine.run()
    engine.check_end()
    assert [(seq.num_tokens, seq.finish_reason) for seq in seqs] == [(most, "length")] * 3


# Preemption


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_takes_the_youngest_and_puts_it_to_the_front(depth: int) -> None:
    engine = Engine(num_blocks=6, max_num_seqs=3, depth=depth)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    first, second, third = (engine.add(ids(7, i), 12) for i in range(3))
    later = engine.add(ids(7, 9), 4)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert [seq.status.name for seq in (first, second)] == ["RUNNING"] * 2
    assert list(engine.scheduler.waiting) == [third.seq_id, later.seq_id]
    assert third.block_table == [] and third.is_prefill and third.slot == -1 and third.num_cached_tokens == 0
    assert len(third.token_ids) == third.num_tokens > 7
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_two_preempted_sequences_keep_their_order(depth: int) -> None:
    engine = Engine(num_blocks=9, max_num_seqs=3, depth=depth, enable_prefix_caching=False)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    seqs = [engine.add(ids(4 * n - 1, i), 20) for i, n in enumerate((4, 3, 2))]
    while engine.scheduler.num_preemptions < 2:
        engine.step()
    waiting = list(engine.scheduler.waiting)
    assert waiting == sorted(waiting) and seqs[0].seq_id in engine.scheduler.running
    engine.run()
    engine.check_end()


def test_a_preempted_sequence_gets_its_token_in_flight() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=3, depth=1)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    seqs = [engine.add(ids(7, i), 12) for i in range(3)]
    while not engine.scheduler.num_preemptions:
        before = seqs[2].num_tokens
        pending = seqs[2].num_pending
        engine.step()
    assert pending == 1 and seqs[2].num_tokens == before + 1 and seqs[2].num_pending == 0
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_sequence_finds_its_full_blocks_again(depth: int) -> None:
    engine = Engine(num_blocks=7, max_num_seqs=2, depth=depth, one_by_one=True)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    first, second = engine.add(ids(10), 3), engine.add(ids(15, 1), 10)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert second.block_table == []  # it needed its fifth block itself
    while not second.block_table:
        engine.step()
    assert first.is_finished and second.num_hit_tokens == 0
    # the last of the 17 tokens is all that is left to compute
    assert engine.batches[-1] == [(second.seq_id, 1)] and engine.scheduler.num_prompt_tokens == 25
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_tiny_pool_gives_the_same_answers(depth: int) -> None:
    engine = Engine(num_blocks=12, max_num_seqs=6, depth=depth)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    for i in range(20):
        engine.add(ids(3 + i % 7, i), 25)
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions >= 20


# Admission


def test_admission_keeps_room_for_the_running_to_grow() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=4)
    for i in range(4):
        engine.add(ids(8, i), 9)  # four blocks each at the end
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions == 0


def test_room_that_one_sequence_gives_back_is_counted_before_the_next_needs_it() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=4)
    engine.add(ids(8), 2)  # two blocks, three at its end, gone after two steps
    engine.add(ids(8, 1), 13)  # two blocks, five at its end, one more only after four steps
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", range(5, 9))
def test_room_comes_back_one_step_after_the_end_with_overlap(depth: int, num_blocks: int) -> None:
    engine = Engine(num_blocks=num_blocks, max_num_seqs=4, depth=depth)
    engine.add(ids(8), 5)
    engine.add(ids(8, 1), 13)  # needs its fourth block in the step after the other's last
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_blocks", "num_admitted"), [(19, 2), (20, 3)])
def test_a_sequence_that_ends_gives_back_no_more_than_it_holds(num_blocks: int, num_admitted: int) -> None:
    engine = Engine(num_blocks=num_blocks, max_num_seqs=4, one_by_one=True)
    for i, max_tokens in enumerate((5, 32, 32)):  # two blocks each now; three, ten and ten at their ends
        engine.add(ids(8, i), max_tokens)
    engine.step()
    assert len(engine.scheduler.running) == num_admitted
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_blocks", "num_admitted"), [(22, 2), (23, 3)])
def test_a_prefix_comes_back_only_with_the_last_that_shares_it(num_blocks: int, num_admitted: int) -> None:
    engine = Engine(num_blocks=num_blocks, max_num_seqs=4, one_by_one=True)
    engine.add(ids(16), 3)  # computes the four blocks, ends soon
    engine.add(ids(16) + ids(4, 1), 30)  # keeps them: 13 blocks at its end
    engine.add(ids(8, 2), 30)  # ten at its end
    engine.step()
    assert len(engine.scheduler.running) == num_admitted
    engine.run()
    engine.check_end()
    assert engine.scheduler.num_preemptions == 0


def test_a_prompt_that_did_not_fit_is_tried_again_when_a_sequence_leaves() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(ids(5), 3)
    engine.add(ids(5, 1), 30)
    third = engine.add(ids(5, 2), 3)
    while not third.block_table:
        engine.step()
    assert engine.num_steps == 4
    engine.run()
    engine.check_end()


def test_newcomers_join_in_groups_but_not_later_than_a_bounded_delay() -> None:
    engine = Engine(num_blocks=1400, max_num_seqs=64, max_num_batched_tokens=640)
    for i in range(63):
        engine.add(ids(5, i), 60)
    engine.add(ids(5, 63), 3)
    newcomers = [engine.add(ids(5, 100 + i), 3) for i in range(8)]
    while not newcomers[0].block_table:
        engine.step()
    assert 16 <= engine.num_steps <= 3 + 16 + 1
    assert not newcomers[1].block_table  # one had left
    engine.run()
    engine.check_end()


def test_a_request_behind_an_aborted_one_that_did_not_fit_is_tried_at_once() -> None:
    engine = Engine(num_blocks=10)
    engine.add(ids(10), 10)
    large = engine.add(ids(36, 1), 2)
    small = engine.add(ids(4, 2), 2)
    engine.step()
    engine.step()
    assert not large.block_table and not small.block_table
    engine.abort(large)
    engine.step()
    assert small.block_table
    engine.run()
    engine.check_end()


# Ends


@pytest.mark.parametrize("depth", [0, 1])
def test_a_length_stop_computes_no_row_for_nothing(depth: int) -> None:
    engine = Engine(depth=depth)
    for i in range(6):
        engine.add(ids(5, i), 1 + i)
    engine.run()
    engine.check_end()
    assert sum(engine.runner.num_sampled.values()) == 21


def test_a_stop_seen_one_step_late_drops_the_token_after_it() -> None:
    prompt = ids(6)
    stop = stop_at(prompt, 4)
    engine = Engine(depth=1)
    seq = engine.add(prompt, 50, [stop])
    engine.run()
    engine.check_end()
    assert seq.token_ids[-1] == stop and seq.finish_reason == "stop" and seq.stop_reason == stop
    assert engine.runner.num_sampled[seq.seq_id] == seq.num_completion_tokens + 1


def prompt_with_eos() -> list[int]:
    return next(p for p in (ids(6, i) for i in range(1000)) if EOS in answer(p, 10, frozenset())[2:])


@pytest.mark.parametrize("depth", [0, 1])
def test_an_end_token_stops_unless_it_is_ignored(depth: int) -> None:
    engine = Engine(depth=depth)
    prompt = prompt_with_eos()
    stopping, ignoring = engine.add(prompt, 12, ignore_eos=False), engine.add(prompt, 12)
    both = engine.add(prompt, 12, [EOS])
    engine.run()
    engine.check_end()
    assert (stopping.last_token, stopping.finish_reason, stopping.stop_reason) == (EOS, "stop", None)
    assert (ignoring.num_completion_tokens, ignoring.finish_reason, ignoring.stop_reason) == (12, "length", None)
    assert (both.token_ids, both.stop_reason) == (stopping.token_ids, EOS)


def test_no_stop_id_ends_a_request_before_min_tokens() -> None:
    prompt = ids(6)
    first = answer(prompt, 1, frozenset())[0]
    engine = Engine()
    seqs = [engine.add(prompt, 30, [first], min_tokens=n) for n in (0, 1, 2, 30)]
    engine.run()
    engine.check_end()
    assert [seq.num_completion_tokens for seq in seqs[:2]] == [1, 1]
    assert seqs[2].num_completion_tokens >= 2 and seqs[3].num_completion_tokens == 30


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    prompt = ids(6)
    out = answer(prompt, 100, frozenset([stop_at(prompt, 4)]))
    engine = Engine(depth=1)
    seq = engine.add(prompt, len(out), [out[-1]])
    engine.run()
    engine.check_end()
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("found", [None, "END"])
def test_a_stop_string_ends_a_request_when_its_text_has_it(found: str | None) -> None:
    engine = Engine()
    seq = engine.add(ids(5), 6)
    seen: list[int] = []
    seq.stop_strings = ["END"]
    seq.detokenizer = SimpleNamespace(append=seen.append, find=lambda stops: found if len(seen) == 3 else None)
    engine.run()
    assert seq.completion_token_ids == seen == answer(ids(5), 3 if found else 6, frozenset())
    assert (seq.finish_reason, seq.stop_reason) == (("stop", "END") if found else ("length", None))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", ["new", "between chunks", "running", "preempted", "finished"])
def test_abort_works_in_every_state(depth: int, state: str) -> None:
    engine = Engine(num_blocks=6, max_num_seqs=3, max_num_batched_tokens=16, depth=depth)
    engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    others = [engine.add(ids(7, i), 12) for i in range(2)] if state in ("running", "preempted") else []
    seq = engine.add(ids(20, 5), 3) if state == "between chunks" else engine.add(ids(7, 5), 12)
    others.append(engine.add(ids(5, 6), 4))
    reached = {
        "new": lambda: True,
        "between chunks": lambda: seq.block_table,
        "running": lambda: seq.num_completion_tokens >= 1,
        "preempted": lambda: engine.scheduler.num_preemptions,
        "finished": lambda: seq.is_finished,
    }[state]
    while not reached():
        engine.step()
    if state == "preempted":
        assert seq.status is SequenceStatus.WAITING and seq.num_completion_tokens
    had = seq.completion_token_ids
    engine.abort(seq)
    engine.abort(seq)
    assert seq.is_finished and not seq.block_table
    assert seq.finish_reason == ("length" if state == "finished" else "abort")
    if not engine.scheduler.is_finished():
        engine.run()
    engine.check_end()
    assert seq.completion_token_ids == had and all(other.finish_reason == "length" for other in others)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_aborted_between_chunks_leaves_only_what_was_computed(depth: int) -> None:
    engine = Engine(max_num_batched_tokens=16, depth=depth)
    first = engine.add(ids(40))
    engine.step()
    engine.abort(first)
    second = engine.add(ids(40))
    engine.run()
    engine.check_end()
    assert second.num_hit_tokens == 16


def test_counters_add_up() -> None:
    engine = Engine(num_blocks=16, max_num_seqs=4)
    for i in range(12):
        engine.add(ids(9, i % 3), 10)
    engine.run()
    engine.check_end()
    scheduler = engine.scheduler
    assert scheduler.num_prompt_tokens == 12 * 9 and scheduler.num_generated_tokens == 120
    assert scheduler.num_hit_tokens == sum(seq.num_hit_tokens for seq in engine.seqs) > 0


# Random workloads


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """One request; prompts of the same `family` start alike."""
    family, shared = draw(st.integers(0, 2)), draw(st.integers(0, 30))
    own = draw(st.integers(1, 25))
    prompt = [*ids(30, 1000 + family)[:shared], *ids(own, draw(st.integers(0, 3)))]
    stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 40)))
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stop_ids": stops,
        "ignore_eos": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, min(6, max_tokens or 6))),
        "arrives": draw(st.one_of(st.just(0), st.integers(0, 30))),
        "aborted": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40))),
        "n": draw(st.sampled_from([1, 1, 1, 2, 4])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
    }


@st.composite
def engines(draw: st.DrawFn, always_admit: bool) -> dict[str, Any]:
    return {
        "num_blocks": draw(st.integers(4, 30) if always_admit else st.integers(4, 80)),
        "block_size": draw(st.sampled_from([2, 3, 4, 8, 16])),
        "max_num_seqs": draw(st.integers(1, 10)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 7, 16, 64, 300])),
        "max_model_len": draw(st.sampled_from([40, 90])),
        "enable_prefix_caching": draw(st.booleans() if not always_admit else st.sampled_from([True, True, False])),
        "depth": draw(st.integers(0, 1)),
    }


def drive(options: dict[str, Any], workload: list[dict[str, Any]], always_admit: bool) -> Engine:
    engine = Engine(**options)
    if always_admit:
        engine.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    todo = sorted(workload, key=lambda request: request["arrives"])
    aborts: list[tuple[int, Sequence]] = []
    clock = 0
    while todo or not engine.scheduler.is_finished():
        while todo and todo[0]["arrives"] <= clock:
            request = dict(todo.pop(0))
            arrives, aborted = request.pop("arrives"), request.pop("aborted")
            capacity = options["num_blocks"] * options["block_size"]
            limit = min(capacity, options["max_model_len"] - 1)
            if len(request["prompt"]) > limit:
                with pytest.raises(ValueError, match=f"must be at most {limit} "):
                    engine.add(**request)
                continue
            seq = engine.add(**request)
            if aborted is not None:
                aborts.append((arrives + aborted, seq))
        for when, seq in aborts:
            if when == clock:
                for sample_ in seq.samples or [seq]:
                    engine.abort(sample_)
        if not engine.scheduler.is_finished():
            engine.step()
        clock += 1
    engine.check_end()
    return engine


SETTINGS = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@SETTINGS
@given(engines(always_admit=False), st.lists(requests(), min_size=1, max_size=14))
def test_any_workload_is_answered_exactly_within_all_limits(
    options: dict[str, Any], workload: list[dict[str, Any]]
) -> None:
    drive(options, workload, always_admit=False)


@SETTINGS
@given(engines(always_admit=True), st.lists(requests(), min_size=4, max_size=14))
def test_any_workload_is_answered_exactly_when_nothing_keeps_the_pool_from_filling(
    options: dict[str, Any], workload: list[dict[str, Any]]
) -> None:
    drive(options, workload, always_admit=True)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_large_random_workloads_with_many_preemptions_are_answered_exactly(depth: int, caching: bool) -> None:
    num_preemptions = 0
    for seed in range(12):
        r = random.Random(seed)
        options = {
            "num_blocks": r.randint(15, 40), "block_size": r.choice([2, 4, 16]), "max_num_seqs": r.randint(4, 16),
            "max_num_batched_tokens": r.choice([16, 40, 200]), "max_model_len": 90,
            "enable_prefix_caching": caching, "depth": depth,
        }  # fmt: skip
        workload = [
            {
                "prompt": ids(30, 1000 + r.randrange(3))[: r.choice([0, 8, 16, 30])] + ids(r.randint(1, 8), i % 9),
                "max_tokens": r.choice([5, 20, 40, None]),
                "stop_ids": r.sample(range(VOCAB), r.choice([0, 0, 2])),
                "arrives": r.choice([0, 0, r.randrange(60)]),
                "aborted": r.choice([None] * 7 + [r.randrange(50)]),
            }
            for i in range(40)
        ]
        num_preemptions += drive(options, workload, always_admit=True).scheduler.num_preemptions
    assert num_preemptions > 100


# The benchmark's lengths: 256 prompts of 100 to 1024 ids, 100 to 1024 tokens to generate, 400 blocks of 256


def bench(
    depth: int, always_admit: bool = False, max_tokens: int | None = None, one_by_one: bool = True
) -> tuple[int, int, float]:
    """Steps, preemptions and the share of prefill tokens beyond those of the prompts.

    With `max_tokens` the requests end at the same lengths, but by a stop id that nobody can foresee.
    one_by_one: they are queued as if a step came between any two.
    """
    Sequence.block_size = 256
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    lengths = [r.randint(100, 1024) for _ in range(256)]
    assert (sum(map(len, prompts)), sum(lengths)) == (142_827, 133_966)
    config = SimpleNamespace(
        max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=4096, kvcache_block_size=256,
        enable_prefix_caching=True,
    )  # fmt: skip
    scheduler = Scheduler(config, 400)  # type: ignore[arg-type]
    if always_admit:
        scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    end, stop_id, other_id = {}, 10001, 10002
    for prompt, length in zip(prompts, lengths):
        seq = Sequence(prompt, SamplingParams(max_tokens=max_tokens or length, ignore_eos=True))
        scheduler.check(seq)
        if max_tokens:
            seq.stop_ids = frozenset([stop_id])
        scheduler.add(seq)
        if one_by_one:
            scheduler.arrived.clear()
        end[seq.seq_id] = len(prompt) + length
    in_flight: deque[tuple[Batch, list[int]]] = deque()
    finished: list[Sequence] = []
    num_steps = num_prefill_tokens = 0
    while not scheduler.is_finished():
        if batch := scheduler.schedule():
            num_steps += 1
            num_prefill_tokens += batch.is_prefill * sum(seq.num_scheduled_tokens for seq in batch.seqs)
            sampled = [
                stop_id if max_tokens and seq.num_tokens + seq.num_pending + 1 == end[seq.seq_id] else other_id
                for seq in batch.seqs[: batch.num_sampled]
            ]
            in_flight.append((batch, sampled))
            scheduler.advance(batch)
        while len(in_flight) > (depth if batch else 0):
            finished += scheduler.postprocess(*in_flight.popleft())
    assert {seq.seq_id: seq.num_tokens for seq in finished} == end
    return num_steps, scheduler.num_preemptions, num_prefill_tokens / 142_827 - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_the_benchmark_workload_hardly_preempts_and_loses_no_steps(depth: int) -> None:
    num_steps, num_preemptions, extra = bench(depth)
    assert num_preemptions <= 5 and extra <= 0.03
    assert num_steps <= 1.1 * bench(depth, always_admit=True)[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_benchmark_workload_takes_fewer_steps_if_it_comes_together(depth: int) -> None:
    num_steps, num_preemptions, extra = bench(depth, one_by_one=False)
    assert num_preemptions <= 5 and extra <= 0.03
    assert num_steps <= 0.9 * bench(depth)[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1024, 2048, 3000])
def test_ends_that_nobody_can_foresee_hardly_preempt_either(depth: int, max_tokens: int) -> None:
    num_steps, num_preemptions, extra = bench(depth, max_tokens=max_tokens)
    assert num_preemptions <= 5 and extra <= 0.03
    assert num_steps <= 1.3 * bench(depth, always_admit=True)[0]
