"""Paged prefill attention against its reference, and this against plain attention."""

import pytest
import torch
from common import DTYPES, assert_close, ints, paged_cache, randn
from torch.nn import functional as F

from nanovllm.kernels.attention_prefill import PrefillConfig, paged_prefill_reference, paged_prefill_triton

LARGE, TMA = PrefillConfig(128, 64, 8, 1), PrefillConfig(64, 16, 4, 2, tma=True)
CASES = [  # kv heads, group, dim, block size, config
    (1, 2, 128, 256, None), (1, 2, 128, 256, TMA), (3, 1, 64, 16, None), (3, 1, 64, 16, TMA), (1, 8, 64, 48, None),
    (1, 7, 32, 16, LARGE), (1, 4, 80, 16, None), (1, 3, 96, 48, None), (1, 1, 256, 256, None), (1, 20, 32, 16, LARGE),
]  # fmt: skip
BATCHES = [  # (tokens in the cache, newest of them in this step) of each sequence
    [(5, 5), (51, 51), (1, 1)],  # whole prompts
    [(115, 27), (33, 1), (48, 48)],  # chunks, a decode step, cached prefixes
]


def batch_of(lens):
    context, new = (list(t) for t in zip(*lens, strict=True))
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    return context, ints(starts), ints(context), max(new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_the_reference(case, lens, dtype):
    kv_heads, group, dim, block_size, config = case
    context, *args = batch_of(lens)
    k, v, tables, rows = paged_cache(context, block_size, kv_heads, dim, dtype)
    q = randn(int(args[0][-1]), kv_heads * group, dim, dtype=dtype)
    out = paged_prefill_triton(q, k, v, tables, rows, *args, dim**-0.5, config=config)
    assert out.dtype == dtype
    assert_close(out, paged_prefill_reference(q.float(), k.float(), v.float(), tables, rows, *args, dim**-0.5))


def test_the_reference_is_causal_attention_aligned_to_the_last_key():
    context, starts, lens, longest = batch_of([(50, 20), (7, 7)])
    k_cache, v_cache, tables, rows = paged_cache(context, 16, 2, 32, torch.float32)
    q = randn(27, 6, 32)
    out = paged_prefill_reference(q, k_cache, v_cache, tables, rows, starts, lens, longest, 0.3)
    for b, (n, lo, hi) in enumerate([(50, 0, 20), (7, 20, 27)]):
        table = tables[rows[b].item(), : -(-n // 16)].long()
        k, v = (c[table].flatten(0, 1)[:n].transpose(0, 1).repeat_interleave(3, 0) for c in (k_cache, v_cache))
        for i in range(lo, hi):
            seen = n - (hi - i) + 1
            expected = F.scaled_dot_product_attention(q[i, :, None], k[:, :seen], v[:, :seen], scale=0.3)[:, 0]
            torch.testing.assert_close(out[i], expected)


def test_queries_may_be_a_view_of_qkv_rows():
    context, *args = batch_of([(40, 40), (20, 3)])
    caches = paged_cache(context, 16, 1, 64, torch.float32)
    q = randn(43, 4, 64)[:, :2]
    out = paged_prefill_triton(q, *caches, *args, 0.125)
    assert_close(out, paged_prefill_reference(q, *caches, *args, 0.125))


def test_a_longest_length_that_is_too_long_changes_nothing():
    context, starts, lens, longest = batch_of([(90, 70), (20, 20)])
    caches = paged_cache(context, 16, 1, 64, torch.float32)
    q = randn(90, 2, 64)
    a, b = (paged_prefill_triton(q, *caches, starts, lens, n, 0.125) for n in (longest, 500))
    assert torch.equal(a, b)
