"""BlockManager: which blocks a sequence gets, shares and leaves behind."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nanovllm.engine import block_manager as module
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

SIZE = 4


@pytest.fixture(autouse=True)
def block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "block_size", SIZE)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bytes], int]], list[bytes]]:
    """Replaces the hash function; returns the list of everything that will be hashed."""

    def replace(function: Callable[[bytes], int]) -> list[bytes]:
        calls: list[bytes] = []

        def digest(data: bytes) -> int:
            calls.append(bytes(data))
            return function(data)

        monkeypatch.setattr(module, "xxhash", SimpleNamespace(xxh64_intdigest=digest))
        return calls

    return replace


def compute(manager: BlockManager, ids: list[int]) -> Sequence:
    """Admit a prompt and compute all of it."""
    seq = Sequence(ids)
    manager.allocate(seq, manager.find_prefix(seq))
    manager.register(seq, seq.num_tokens)
    return seq


def remember(manager: BlockManager, ids: list[int]) -> list[int]:
    """Compute a prompt, release it, and return the blocks that it had."""
    seq = compute(manager, ids)
    table = seq.block_table
    manager.release(seq)
    return table


def hits(manager: BlockManager, ids: list[int]) -> list[int]:
    return manager.find_prefix(Sequence(ids))


def ref_counts(manager: BlockManager) -> list[int]:
    return [block.ref_count for block in manager.blocks]


# Hits


def test_a_prompt_shares_the_full_blocks_of_a_running_one() -> None:
    manager = BlockManager(8, SIZE)
    first = compute(manager, list(range(10)))
    second = compute(manager, [*range(8), 50, 51])
    assert second.block_table[:2] == first.block_table[:2] and second.block_table[2] != first.block_table[2]
    assert second.num_cached_tokens == 8
    assert sorted(ref_counts(manager)) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert len(manager.free) == 4


def test_a_prompt_revives_the_blocks_of_one_that_has_left() -> None:
    manager = BlockManager(8, SIZE)
    table = remember(manager, list(range(10)))
    assert len(manager.free) == 8
    again = compute(manager, list(range(10)))
    assert again.block_table[:2] == table[:2] and len(manager.free) == 5


def test_blocks_are_not_found_before_their_tokens_are_computed() -> None:
    manager = BlockManager(8, SIZE)
    seq = Sequence(range(12))
    manager.allocate(seq, [])
    assert hits(manager, list(range(13))) == []
    manager.register(seq, 7)
    assert hits(manager, list(range(13))) == seq.block_table[:1]
    manager.register(seq, 8)
    assert hits(manager, list(range(13))) == seq.block_table[:2]
    manager.register(seq, 12)
    assert hits(manager, list(range(13))) == seq.block_table


def test_a_partial_block_is_never_shared() -> None:
    manager = BlockManager(8, SIZE)
    compute(manager, list(range(7)))
    assert len(hits(manager, list(range(7)))) == 1
    assert len(hits(manager, list(range(30)))) == 1


@pytest.mark.parametrize(("n", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_at_least_one_token_of_a_prompt_is_computed(n: int, num_hits: int) -> None:
    manager = BlockManager(8, SIZE)
    remember(manager, list(range(20)))
    seq = compute(manager, list(range(n)))
    assert seq.num_cached_tokens == num_hits * SIZE < n


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    manager = BlockManager(8, SIZE)
    table = remember(manager, list(range(16)))
    assert hits(manager, [*range(4), 99, *range(5, 20)]) == table[:1]
    assert hits(manager, [99, *range(1, 20)]) == []


def test_generated_tokens_can_be_shared_too() -> None:
    manager = BlockManager(8, SIZE)
    seq = compute(manager, list(range(6)))
    for token_id in (6, 7, 8):
        seq.append_token(token_id)
    manager.append_block(seq)
    manager.register(seq, 8)
    assert hits(manager, list(range(9))) == seq.block_table[:2]


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    manager = BlockManager(16, SIZE)
    a, b, x = [1] * SIZE, [2] * SIZE, [3] * SIZE
    remember(manager, a + x)
    assert len(hits(manager, [*b, *x, 0])) == 0
    table = remember(manager, b + x)
    assert hits(manager, [*b, *x, 0]) == table
    assert hits(manager, x + a + [0]) == []
    assert len(hits(manager, a + a + [*x, 0])) == 1


def test_the_order_of_the_blocks_matters() -> None:
    manager = BlockManager(16, SIZE)
    a, b = [1] * SIZE, [2] * SIZE
    remember(manager, a + b)
    assert hits(manager, b + a + [0]) == []


def test_content_computed_twice_is_found_once_and_both_copies_have_one_owner() -> None:
    manager = BlockManager(8, SIZE)
    seqs = [Sequence(range(9)) for _ in range(2)]
    for seq in seqs:  # both admitted before either is computed
        manager.allocate(seq, [])
    for seq in seqs:
        manager.register(seq, 9)
    assert not set(seqs[0].block_table) & set(seqs[1].block_table)
    assert hits(manager, list(range(9))) == seqs[0].block_table[:2]


def test_blocks_behind_either_copy_of_the_same_content_are_found() -> None:
    manager = BlockManager(12, SIZE)
    first, second = Sequence([*range(8), 20, 21, 22, 23]), Sequence([*range(8), 30, 31, 32, 33])
    for seq in (first, second):
        manager.allocate(seq, [])
    for seq in (first, second):
        manager.register(seq, 12)
    assert hits(manager, [*second.token_ids, 0]) == [*first.block_table[:2], second.block_table[2]]


def test_without_prefix_caching_nothing_is_shared_or_hashed(hashing: Callable) -> None:
    calls = hashing(lambda data: 7)
    manager = BlockManager(8, SIZE, enable_prefix_caching=False)
    first, second = compute(manager, list(range(9))), compute(manager, list(range(9)))
    assert not set(first.block_table) & set(second.block_table)
    assert second.num_cached_tokens == 0 and not calls
    manager.release(first)
    assert hits(manager, list(range(9))) == []


# Hashes


def test_a_hash_chains_the_parents_hash_and_the_ids(hashing: Callable) -> None:
    calls = hashing(len)
    manager = BlockManager(8, SIZE)
    compute(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(calls) == 2
    assert calls[0] == bytes(8) + b"".join(i.to_bytes(4, "little") for i in (1, 2, 3, 4))
    parent = len(calls[0]).to_bytes(8, "little")
    assert calls[1] == parent + b"".join(i.to_bytes(4, "little") for i in (5, 6, 7, 8))


def test_a_prompt_is_hashed_once_however_often_it_is_tried(hashing: Callable) -> None:
    calls = hashing(lambda data: hash(data) % 2**64)
    manager = BlockManager(8, SIZE)
    seq = Sequence(range(21))
    for _ in range(10):
        manager.find_prefix(seq)
    assert len(calls) == 5
    manager.allocate(seq, [])
    manager.register(seq, 21)
    manager.release(seq)  # a preemption
    manager.allocate(seq, manager.find_prefix(seq))
    manager.register(seq, 21)
    assert len(calls) == 5
    for token_id in range(3):
        seq.append_token(token_id)
    manager.register(seq, 24)
    assert len(calls) == 6


def content_of(manager: BlockManager, written: dict[int, tuple[int, ...]], ids: list[int]) -> list[tuple[int, ...]]:
    return [written[block_id] for block_id in hits(manager, ids)]


@pytest.mark.parametrize("digest", [lambda data: 0, lambda data: data[-SIZE * 4]], ids=["constant", "first id"])
def test_colliding_hashes_never_serve_another_prefix(hashing: Callable, digest: Callable) -> None:
    """Blocks of few contents at all depths behind all parents; `written` models the K/V of each block."""
    hashing(digest)
    manager = BlockManager(6, SIZE)
    written: dict[int, tuple[int, ...]] = {}
    contents = [[1] * SIZE, [2] * SIZE, [1, 2, 1, 2]]
    prompts = [[*a, 9] for a in contents]
    prompts += [[*a, *b, 9] for a in contents for b in contents]
    prompts += [[*a, *b, *c, 9] for a in contents for b in contents for c in contents]
    num_hits = 0
    for ids in prompts * 3 + [p for p in prompts for _ in range(2)]:
        seq = Sequence(ids)
        prefix = manager.find_prefix(seq)
        for i, block_id in enumerate(prefix):
            assert written[block_id] == tuple(ids[: (i + 1) * SIZE])
        num_hits += len(prefix)
        manager.allocate(seq, prefix)
        for i in range(len(prefix), seq.num_blocks):
            written[seq.block_table[i]] = tuple(ids[: (i + 1) * SIZE])
        manager.register(seq, seq.num_tokens)
        manager.release(seq)
    assert num_hits  # the test is about hits


def test_colliding_blocks_of_equal_ids_at_another_depth_are_misses(hashing: Callable) -> None:
    hashing(lambda data: 0)
    manager = BlockManager(8, SIZE)
    x = [5] * SIZE
    first = compute(manager, x + x + x)
    # one entry is left under the only hash: the first block or one that is no start of a prompt
    assert hits(manager, [*x, 0]) in ([], first.block_table[:1])
    assert hits(manager, [6] * SIZE + [*x, 0]) == []


def test_colliding_blocks_of_equal_ids_behind_another_parent_are_misses(hashing: Callable) -> None:
    hashing(lambda data: data[-SIZE * 4])  # the first id of a block alone: its parent does not count
    manager = BlockManager(8, SIZE)
    a, b, x = [1] * SIZE, [2] * SIZE, [3] * SIZE
    first, second = compute(manager, a + x), compute(manager, b)
    assert hits(manager, [*a, *x, 0]) == first.block_table
    assert hits(manager, [*b, *x, 0]) == second.block_table


# Free blocks


def test_free_blocks_are_reused_least_recently_used_first() -> None:
    manager = BlockManager(4, SIZE)
    old, new = remember(manager, [1] * 8), remember(manager, [2] * 8)
    seq = compute(manager, [3] * 8)
    assert set(seq.block_table) == set(old)
    assert hits(manager, [2] * 9) == new and hits(manager, [1] * 9) == []


def test_a_hit_makes_a_block_recently_used() -> None:
    manager = BlockManager(4, SIZE)
    first = remember(manager, [1] * 8)
    remember(manager, [2] * 8)
    remember(manager, [1] * 9)  # its third block takes one of the second prompt
    compute(manager, [3] * 8)
    assert hits(manager, [1] * 9) == first and hits(manager, [2] * 9) == []


def test_a_sequence_is_forgotten_from_its_tail() -> None:
    manager = BlockManager(4, SIZE)
    table = remember(manager, list(range(16)))
    for n in (3, 2, 1):
        filler = compute(manager, [100 + n])
        assert filler.block_table == [table[n]]
        assert hits(manager, list(range(17))) == table[:n]


def test_blocks_without_content_are_reused_before_any_that_can_be_found() -> None:
    manager = BlockManager(4, SIZE)
    table = remember(manager, list(range(8)))
    empty = [remember(manager, [100])[0], *remember(manager, [101])]  # released after the two full ones
    fillers = [compute(manager, [200]), compute(manager, [201])]
    assert {seq.block_table[0] for seq in fillers} == set(range(4)) - set(table) >= set(empty)
    assert hits(manager, list(range(9))) == table


def test_a_block_forgets_its_content_when_it_is_reused() -> None:
    manager = BlockManager(3, SIZE)
    remember(manager, list(range(12)))
    other = compute(manager, list(range(50, 62)))
    assert hits(manager, list(range(13))) == []
    manager.release(other)
    assert len(hits(manager, list(range(50, 63)))) == 3
    assert len(manager.cached) == 3


def test_reusing_one_copy_of_a_content_does_not_hide_the_other() -> None:
    manager = BlockManager(4, SIZE)
    seqs = [Sequence([1] * 5) for _ in range(2)]
    for seq in seqs:
        manager.allocate(seq, [])
    for seq in seqs:
        manager.register(seq, 5)
    found = seqs[0].block_table[:1]
    manager.release(seqs[1])  # the copy that is not the one to be found
    for n in range(2):
        compute(manager, [100 + n])
    assert hits(manager, [1] * 5) == found


def test_a_shared_block_stays_until_its_last_owner_leaves() -> None:
    manager = BlockManager(4, SIZE)
    first, second = compute(manager, list(range(8))), compute(manager, list(range(8)))
    shared = first.block_table[0]
    assert second.block_table[0] == shared
    manager.release(first)
    assert shared not in manager.free and manager.blocks[shared].ref_count == 1
    manager.release(second)
    assert len(manager.free) == 4 and ref_counts(manager) == [0] * 4


def test_release_leaves_the_sequence_without_blocks() -> None:
    manager = BlockManager(4, SIZE)
    seq = compute(manager, list(range(9)))
    manager.release(seq)
    assert (seq.block_table, seq.num_cached_tokens, seq.num_registered_blocks) == ([], 0, 0)
    manager.release(seq)  # nothing left to give
    assert len(manager.free) == 4


def test_an_empty_pool_has_no_block_to_give() -> None:
    manager = BlockManager(2, SIZE)
    seq = compute(manager, list(range(8)))
    with pytest.raises(KeyError):
        manager.append_block(seq)
    assert len(seq.block_table) == 2


def test_room_is_counted_with_the_blocks_that_a_hit_takes_off_the_free_list() -> None:
    manager = BlockManager(4, SIZE)
    prefix = remember(manager, list(range(8)))
    assert manager.num_free_after([], 16) == 0 and manager.num_free_after([], 17) == -1
    assert manager.num_free_after(prefix, 16) == 0 and manager.num_free_after(prefix, 17) == -1
    running = compute(manager, list(range(8)))  # one hit, in use now, and one block of its own
    assert manager.num_free_after(running.block_table[:1], 12) == 0


def test_taking_a_block_from_the_middle_of_the_free_list_costs_no_search() -> None:
    """Hits on 2,000 blocks behind 100,000 others: a list would compare ids 10^8 times."""
    manager = BlockManager(200_000, SIZE)
    compute(manager, list(range(100_000)))
    for i in range(2000):
        remember(manager, [i] * SIZE)
    start = time.process_time()  # other processes must not count
    seqs = [compute(manager, [i] * (SIZE + 1)) for i in range(2000)]
    assert time.process_time() - start < 1.0
    assert all(seq.num_cached_tokens == SIZE for seq in seqs)
