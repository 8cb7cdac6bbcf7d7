"""Sequence: counters, slices and the state that travels to other ranks."""

import pickle

import pytest

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "block_size", 4)


def decoding(num_prompt_tokens: int, num_blocks: int = 3, num_generated: int = 3) -> Sequence:
    """A sequence in a decode step, with counters as the scheduler would set them."""
    seq = Sequence(range(1000, 1000 + num_prompt_tokens))
    for token_id in range(num_generated):
        seq.append_token(token_id)
    seq.is_prefill = False
    seq.block_table = list(range(num_blocks))
    seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 1
    return seq


def test_a_new_sequence_waits_and_has_computed_nothing() -> None:
    seq = Sequence([5, 6, 7])
    assert seq.status is SequenceStatus.WAITING and not seq.is_finished and seq.is_prefill
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (3, 3, 3, 0)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.num_pending) == (0, 0, 0)
    assert seq.last_token == 7 and seq.block_table == []


def test_ids_of_sequences_never_repeat() -> None:
    ids = [Sequence([1]).seq_id for _ in range(100)]
    assert ids == sorted(set(ids))


def test_the_callers_list_is_copied() -> None:
    prompt = [1, 2, 3]
    seq = Sequence(prompt)
    seq.append_token(4)
    assert prompt == [1, 2, 3]
    prompt[0] = 9
    assert seq.token_ids == [1, 2, 3, 4]


def test_sampling_params_are_taken_over() -> None:
    params = SamplingParams(temperature=0.25, max_tokens=9, min_tokens=2, ignore_eos=True, seed=11)
    seq = Sequence([1, 2], params)
    assert (seq.temperature, seq.max_tokens, seq.min_tokens, seq.ignore_eos, seq.seed) == (0.25, 9, 2, True, 11)
    assert seq.max_num_tokens == 11


def test_appended_tokens_belong_to_the_completion() -> None:
    seq = Sequence([1, 2, 3])
    for token_id in (7, 8):
        seq.append_token(token_id)
    assert (seq.last_token, len(seq), seq.num_prompt_tokens, seq.num_completion_tokens) == (8, 5, 3, 2)
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([1, 2, 3], [7, 8])


def test_indexing_and_slicing_give_ids() -> None:
    seq = Sequence(range(10))
    assert seq[2:5] == [2, 3, 4] and seq[-1] == 9 and seq[8:] == [8, 9] and seq[10:] == []


@pytest.mark.parametrize(
    ("n", "num_blocks", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)]
)
def test_blocks_are_counted_by_ceiling_division(n: int, num_blocks: int, last: int) -> None:
    seq = Sequence(range(n))
    assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, last)
    assert [token for i in range(num_blocks) for token in seq.block(i)] == list(range(n))
    assert len(seq.block(num_blocks - 1)) == last


@pytest.mark.parametrize("i", [-1, -3, 3, 100])
def test_a_block_outside_the_sequence_is_an_error(i: int) -> None:
    with pytest.raises(IndexError, match=f"block {i} of a sequence of 3 blocks"):
        Sequence(range(9)).block(i)


def test_a_sequence_has_no_room_for_misspelt_fields() -> None:
    with pytest.raises(AttributeError):
        Sequence([1]).num_cached_token = 3  # type: ignore[attr-defined]


# Pickled state


def test_a_prompt_travels_whole_while_nothing_of_it_is_cached() -> None:
    seq = Sequence(range(9), SamplingParams(temperature=0.5, seed=3))
    seq.block_table, seq.slot, seq.num_scheduled_tokens = [4, 2, 7], 5, 9
    assert seq.__getstate__() == (9, 9, 0, 9, [4, 2, 7], list(range(9)), 5, 0.5, 3)
    received = pickle.loads(pickle.dumps(seq))
    assert received.is_prefill and received.token_ids == list(range(9)) and received.last_token == 8
    assert (received.num_tokens, received.num_prompt_tokens) == (9, 9)
    assert (received.num_cached_tokens, received.num_scheduled_tokens) == (0, 9)
    assert (received.block_table, received.slot) == ([4, 2, 7], 5)
    assert (received.temperature, received.seed) == (0.5, 3)


def test_a_chunk_behind_a_cached_prefix_travels_alone() -> None:
    seq = Sequence(range(100, 120))
    seq.block_table, seq.num_cached_tokens, seq.num_scheduled_tokens = [0, 1, 2, 3, 4], 8, 5
    assert seq.__getstate__()[:6] == (20, 20, 8, 5, [0, 1, 2, 3, 4], [108, 109, 110, 111, 112])
    received = pickle.loads(pickle.dumps(seq))
    assert received.is_prefill and received.token_ids == [108, 109, 110, 111, 112]
    assert (received.num_tokens, received.num_cached_tokens, received.num_scheduled_tokens) == (20, 8, 5)


def test_the_last_chunk_behind_a_cached_prefix_travels_to_its_end() -> None:
    seq = Sequence(range(100, 110))
    seq.num_cached_tokens, seq.num_scheduled_tokens = 8, 2
    assert pickle.loads(pickle.dumps(seq)).token_ids == [108, 109]


def test_a_preempted_sequence_travels_with_the_tokens_it_has_generated() -> None:
    seq = Sequence([1, 2, 3])
    seq.append_token(7)
    seq.append_token(8)
    seq.num_cached_tokens, seq.num_scheduled_tokens = 0, 5
    assert seq.__getstate__()[:6] == (5, 3, 0, 5, [], [1, 2, 3, 7, 8])


def test_a_decoding_sequence_travels_with_its_last_token_only() -> None:
    seq = decoding(9)
    assert seq.__getstate__()[:6] == (12, 9, 11, 1, [0, 1, 2], 2)
    received = pickle.loads(pickle.dumps(seq))
    assert not received.is_prefill and received.token_ids == [] and received.last_token == 2
    assert (len(received), received.num_prompt_tokens, received.num_completion_tokens) == (12, 9, 3)
    assert (received.num_cached_tokens, received.num_scheduled_tokens) == (11, 1)


def test_the_sender_is_unchanged_by_sending() -> None:
    for seq in (Sequence(range(9)), decoding(9)):
        before = {name: getattr(seq, name) for name in Sequence.__slots__}
        pickle.dumps(seq)
        assert before == {name: getattr(seq, name) for name in Sequence.__slots__}


def test_a_decode_message_grows_with_the_block_table_only() -> None:
    # counters of the same number of bytes in pickle's encoding
    sizes = {len(pickle.dumps(decoding(n))) for n in (300, 3_000, 30_000)}
    assert len(sizes) == 1 and sizes.pop() < 250
    without = len(pickle.dumps(decoding(300, num_blocks=0)))
    assert len(pickle.dumps(decoding(300, num_blocks=200))) - without < 3 * 200


def test_a_chunk_message_does_not_grow_with_the_prefix_behind_it() -> None:
    def message(num_prefix_tokens: int) -> int:
        seq = Sequence(range(num_prefix_tokens + 64))
        seq.num_cached_tokens, seq.num_scheduled_tokens = num_prefix_tokens, 64
        return len(pickle.dumps(seq))

    assert message(30_000) == message(300) < 500
