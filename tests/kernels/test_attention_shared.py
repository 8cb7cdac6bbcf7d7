"""Decode with a shared prefix read once gives what decode without it gives."""

import pytest
import torch
from common import DTYPES, assert_close, ints, paged_cache, randn

from nanovllm.kernels.attention_decode import paged_decode_reference, paged_decode_triton
from nanovllm.kernels.attention_shared import shared_prefix_splits, shared_prefix_triton

CASES = [  # kv heads, group, dim, block size, shared blocks, batch
    (2, 2, 128, 256, 1, 5), (1, 2, 64, 16, 5, 70), (3, 1, 80, 16, 4, 3), (1, 7, 32, 48, 3, 20), (2, 8, 64, 16, 17, 17),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_shared_prefix_read_once_changes_nothing(case, dtype):
    kv_heads, group, dim, block_size, blocks, batch = case
    shared = blocks * block_size
    lens = [shared + (13 * i) % 50 for i in range(batch)]  # the first ends with the prefix itself
    k, v, tables, rows = paged_cache(lens, block_size, kv_heads, dim, dtype)
    tables[:, :blocks] = tables[rows[0].item(), :blocks].clone()
    q = randn(batch, kv_heads * group, dim, dtype=dtype)
    prefix = (ints([shared]), *shared_prefix_triton(q, k, v, tables, rows, ints([shared]), dim**-0.5))
    out = paged_decode_triton(q, k, v, tables, rows, ints(lens), dim**-0.5, prefix=prefix)
    assert_close(out, paged_decode_reference(q.float(), k.float(), v.float(), tables, rows, ints(lens), dim**-0.5))


def test_a_prefix_that_ends_inside_a_split_leaves_the_rest_of_the_splits_empty():
    lens = [100, 90]
    k, v, tables, rows = paged_cache(lens, 16, 1, 32, torch.float32)
    tables[:, :2] = tables[rows[0].item(), :2].clone()
    q = randn(2, 2, 32)
    partial, lse = shared_prefix_triton(q, k, v, tables, rows, ints([32]), 0.2)
    assert lse.shape[2] > 1 and lse[:, :, 0].isfinite().all() and (lse[:, :, 1:] == -torch.inf).all()
    out = paged_decode_triton(q, k, v, tables, rows, ints(lens), 0.2, prefix=(ints([32]), partial, lse))
    assert_close(out, paged_decode_reference(q, k, v, tables, rows, ints(lens), 0.2))


def test_splits_shrink_as_the_batch_grows():
    assert shared_prefix_splits(512, 16, 8, 132) <= shared_prefix_splits(32, 16, 8, 132) <= 16
