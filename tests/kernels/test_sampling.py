"""Sampling: greedy, Gumbel-max, shards, seeds; the kernel against the reference; the distribution."""

import pytest
import torch
from common import DEVICE, DTYPES, ints, randn

from nanovllm.kernels.sampling import (
    gumbel_reference,
    sample_with_scores_reference,
    sample_with_scores_triton,
)

BOTH = pytest.mark.parametrize("sample", [sample_with_scores_reference, sample_with_scores_triton])


def floats(values):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def inputs(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0):
    logits = 3 * randn(rows, vocab, dtype=dtype, seed=seed)
    temperatures = floats([(0.0, 0.6, 1.0, 0.01, 5.0)[i % 5] for i in range(rows)])
    seeds = ints([(-1) ** i * (1 << 40) * i + i for i in range(rows)], torch.int64)
    return logits, temperatures, seeds, ints([i * 7919 for i in range(rows)], torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,vocab,config", [(1, 5, None), (10, 1024, None), (6, 5003, (512, 3, 4)), (3, 12000, None)]
)
def test_the_kernel_draws_what_the_reference_draws(rows, vocab, config, dtype):
    args = inputs(rows, vocab, dtype)
    scores, ids = sample_with_scores_triton(*args, config=config)
    expected_scores, expected_ids = sample_with_scores_reference(*args)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)
    torch.testing.assert_close(scores, expected_scores, rtol=2e-5, atol=2e-5)


def test_the_kernel_draws_what_the_reference_draws_over_many_positions():
    rows, vocab = 400 if DEVICE == "cuda" else 32, 700
    logits = randn(1, vocab).expand(rows, vocab)
    args = logits, floats([0.8] * rows), ints([5] * rows, torch.int64), torch.arange(rows, device=DEVICE)
    _, ids = sample_with_scores_triton(*args)
    assert torch.equal(ids, sample_with_scores_reference(*args)[1])
    assert len(set(ids.tolist())) > rows // 4


@BOTH
def test_temperature_zero_takes_the_lowest_of_equal_logits(sample):
    logits = torch.zeros(3, 3000, device=DEVICE)
    logits[0, [2500, 77, 1030]] = 2.0
    logits[1] = float("-inf")
    logits[2, 2999] = 1e-3
    _, ids = sample(logits, floats([0] * 3), ints([1, 2, 3], torch.int64), ints([0] * 3))
    assert ids.tolist() == [77, 0, 2999]


@BOTH
def test_nan_is_never_drawn_and_rows_of_nan_give_a_valid_id(sample):
    logits = torch.full((4, 1500), float("nan"), device=DEVICE)
    logits[:2, 1400] = -50.0
    _, ids = sample(logits, floats([0, 1, 0, 1]), ints([1] * 4, torch.int64), ints([0] * 4))
    assert ids[:2].tolist() == [1400, 1400] and all(0 <= i < 1500 for i in ids.tolist())


@BOTH
def test_a_token_masked_with_minus_infinity_is_never_drawn(sample):
    logits = torch.full((24, 50), float("-inf"), device=DEVICE)
    logits[:, [3, 48]] = 0.0
    _, ids = sample(logits, floats([2.0] * 24), ints(list(range(24)), torch.int64), ints([9] * 24))
    assert set(ids.tolist()) == {3, 48}


@BOTH
def test_shards_of_the_vocabulary_agree_with_the_whole(sample):
    logits, *args = inputs(10, 4096, torch.float32)
    _, ids = sample(logits, *args)
    shards = [sample(logits[:, o : o + 1024], *args, vocab_offset=o) for o in range(0, 4096, 1024)]
    scores = torch.stack([s for s, _ in shards])
    assert torch.equal(torch.stack([i for _, i in shards]).gather(0, scores.argmax(0)[None])[0], ids)


@BOTH
def test_rows_say_whose_temperature_and_seed_it_is_and_where_ids_go(sample):
    _, temperatures, seeds, _ = inputs(9, 1, torch.float32)
    logits, *_, positions = inputs(6, 3000, torch.bfloat16)
    rows, padding = ints([4, 1, 6, 3, 8, 8]), 8
    where = rows.long()
    expected_scores, expected = sample_with_scores_reference(logits, temperatures[where], seeds[where], positions)
    last_tokens, out = (ints([-1] * n, torch.int64) for n in (9, 7))
    for _ in range(2):  # the second time, the counters must have gone back to zero
        scores, ids = sample(logits, temperatures, seeds, positions, rows, last_tokens, out[:6])
        assert ids.data_ptr() == out.data_ptr() and torch.equal(ids, expected) and out[6] == -1
        torch.testing.assert_close(scores, expected_scores, rtol=2e-5, atol=2e-5)
        assert torch.equal(last_tokens[where[:4]], expected[:4]) and last_tokens[padding] in expected[4:]
        assert (last_tokens[[0, 2, 5, 7]] == -1).all()
        assert torch.equal(sample(logits, temperatures, seeds, positions, rows)[1], expected)


@BOTH
def test_a_row_draws_the_same_alone_and_in_a_batch(sample):
    args = inputs(6, 3000, torch.bfloat16)
    _, together = sample(*args)
    for i in range(6):
        assert sample(*(a[i : i + 1] for a in args))[1].item() == together[i].item()


def draws(logits, seeds, positions, temperature=1.0):
    n = max(len(seeds), len(positions))
    rows = torch.tensor(logits).expand(n, -1)
    return sample_with_scores_reference(rows, torch.full((n,), temperature), seeds.expand(n), positions.expand(n))[1]


@pytest.mark.parametrize("varying", ["position", "seed", "high half of seed"])
def test_draws_follow_the_softmax(varying):
    n, logits, temperature = 200_000, [0.0, 1.0, -2.0, 2.5, 0.3, -6.0, 2.5, 1.7], 0.7
    counter, fixed = torch.arange(n), torch.tensor([12345])
    if varying == "position":
        ids = draws(logits, fixed, counter, temperature)
    else:
        ids = draws(logits, counter << 32 if varying != "seed" else counter, fixed, temperature)
    p = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    counts = ids.bincount(minlength=8)
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum().item()
    assert chi2 < 24.3  # 7 degrees of freedom, p = 0.001


def test_consecutive_draws_are_independent():
    ids = draws([0.0] * 4, torch.tensor([7]), torch.arange(100_001))
    pairs = (ids[:-1] * 4 + ids[1:]).bincount(minlength=16)
    chi2 = ((pairs - 6250.0) ** 2 / 6250).sum().item()
    assert chi2 < 37.7  # 15 degrees of freedom, p = 0.001


def test_the_noise_is_gumbel_in_the_bulk_and_in_the_upper_tail():
    g = gumbel_reference(torch.arange(100), torch.zeros(100), torch.arange(20_000)).flatten().double()
    assert abs(g.mean() - 0.5772) < 5e-3 and abs(g.var() - 1.6449) < 2e-2
    for x in (0.0, 3.0, 8.0, 11.0):
        expected = g.numel() * -torch.expm1(-torch.exp(torch.tensor(-x, dtype=torch.float64))).item()
        assert abs((g > x).sum().item() - expected) < 4 * expected**0.5
    tokens = g.view(100, 20_000)
    assert abs(torch.corrcoef(tokens[:, :2].T)[0, 1]) < 0.4
    assert abs((tokens[:, 1:] * tokens[:, :-1]).mean() - 0.5772**2) < 1e-2  # neighbouring tokens
    assert abs((tokens[1:] * tokens[:-1]).mean() - 0.5772**2) < 1e-2  # neighbouring seeds
