"""Paged decode attention against its reference, and this against plain attention."""

import itertools
import math
from functools import partial

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, ints, paged_cache, randn
from torch.nn import functional as F

from nanovllm.kernels.attention_decode import (
    MOST_ROTATED,
    Rotation,
    decode_splits,
    paged_decode_reference,
    paged_decode_triton,
    rotated_decode_reference,
)
from nanovllm.layers import attention_backend
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import TorchBackend, TritonBackend
from nanovllm.utils.context import Context

CASES = [  # kv heads, group, dim, block size, splits
    (2, 2, 128, 256, 1), (2, 2, 128, 256, 8), (3, 1, 64, 16, 3), (1, 8, 64, 48, 1), (1, 8, 64, 48, 8),
    (2, 7, 32, 16, 3), (1, 4, 80, 16, 1), (1, 2, 96, 48, 2), (1, 16, 32, 16, 1), (1, 1, 256, 16, 4), (1, 5, 48, 48, 8),
]  # fmt: skip
LENS = [1, 17, 64, 0, 129, 211]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_decode_equals_the_reference(case, dtype, monkeypatch):
    kv_heads, group, dim, block_size, splits = case
    caches = paged_cache(LENS, block_size, kv_heads, dim, dtype)
    q = randn(len(LENS), kv_heads * group, dim, dtype=dtype)
    monkeypatch.setattr(torch, "empty", partial(torch.full, fill_value=math.nan))
    out = paged_decode_triton(q, *caches, ints(LENS), dim**-0.5, splits)
    k, v, tables, rows = caches
    assert_close(out, paged_decode_reference(q.float(), k.float(), v.float(), tables, rows, ints(LENS), dim**-0.5))
    assert (out[3] == 0).all()  # no keys: padding


def test_the_reference_is_attention_over_each_sequence():
    k_cache, v_cache, tables, rows = paged_cache(LENS, 16, 2, 32, torch.float32)
    q = randn(len(LENS), 6, 32)
    out = paged_decode_reference(q, k_cache, v_cache, tables, rows, ints(LENS), 0.3)
    for b, n in enumerate(LENS):
        table = tables[rows[b].item(), : -(-n // 16)].long()
        k, v = (c[table].flatten(0, 1)[:n].transpose(0, 1).repeat_interleave(3, 0) for c in (k_cache, v_cache))
        expected = F.scaled_dot_product_attention(q[b, :, None], k, v, scale=0.3)[:, 0] if n else 0 * q[b]
        torch.testing.assert_close(out[b], expected)


def test_several_splits_give_the_same_bits_every_time():
    caches = paged_cache([500, 700], 16, 1, 64, torch.bfloat16)
    q = randn(2, 4, 64, dtype=torch.bfloat16)
    a, b = (paged_decode_triton(q, *caches, ints([500, 700]), 0.125, 8) for _ in range(2))
    assert torch.equal(a, b)


def test_queries_may_be_a_view_of_qkv_rows():
    caches = paged_cache([40, 3], 16, 1, 64, torch.float32)
    qkv = randn(2, 4, 64)
    out = paged_decode_triton(qkv[:, :2], *caches, ints([40, 3]), 0.125)
    assert_close(out, paged_decode_reference(qkv[:, :2], *caches, ints([40, 3]), 0.125))


def rotation(dim, positions, dtype):
    q_weight, k_weight = 1 + randn(2, dim, seed=3).to(dtype) / 4
    angle = randn(positions, dim // 2, seed=4)
    return Rotation(q_weight, k_weight, torch.cat((angle.cos(), angle.sin()), -1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES[1:] if DEVICE == "cuda" else DTYPES[:2])
@pytest.mark.parametrize("case", CASES)
def test_decode_of_qkv_equals_the_reference(case, dtype, monkeypatch):
    """Lengths at and beside the ends of tiles and splits, where the new key begins one of its own."""
    kv_heads, group, dim, block_size, splits = case
    lens = [*LENS, 16, 33, 65, 128]
    k_cache, v_cache, tables, rows = paged_cache(lens, block_size, kv_heads, dim, dtype)
    for row, n in zip(rows.tolist(), lens):
        if n:  # the new key is not there yet
            k_cache[tables[row, (n - 1) // block_size], (n - 1) % block_size] = math.nan
            v_cache[tables[row, (n - 1) // block_size], (n - 1) % block_size] = math.nan
    qkv, turn = randn(len(lens), (group + 2) * kv_heads * dim, dtype=dtype), rotation(dim, 256, dtype)
    caches = (k_cache.clone(), v_cache.clone())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", partial(torch.full, fill_value=math.nan))
        out = paged_decode_triton(qkv, *caches, tables, rows, ints(lens), dim**-0.5, splits, rotation=turn)
    expected = rotated_decode_reference(qkv, k_cache, v_cache, tables, rows, ints(lens), dim**-0.5, turn)
    assert_close(out, expected)
    assert (out[3] == 0).all()
    assert_close(caches[0].nan_to_num(), k_cache.nan_to_num())
    assert torch.equal(caches[1].nan_to_num(), v_cache.nan_to_num())
    assert torch.equal(caches[0].isnan(), k_cache.isnan())  # what no sequence owns


@pytest.mark.parametrize(("dtype", "batch", "group", "one_launch"), [
    (torch.float16, 3, 2, True), (torch.float16, MOST_ROTATED + 1, 2, False), (torch.float32, 3, 2, False),
    (torch.float16, 3, 15, True), (torch.float16, 3, 16, False),
])  # fmt: skip
def test_the_attention_layer_gives_the_same_by_one_launch_and_by_two(dtype, batch, group, one_launch, monkeypatch):
    launches = []

    def launch(*args, **options):
        launches.append(options)
        return paged_decode_triton(*args, **options)

    monkeypatch.setattr(attention_backend, "paged_decode", launch)
    monkeypatch.setattr(attention_backend, "paged_decode_triton", launch)
    lens = [40, 3, 17, *[1] * (batch - 3)]
    k_cache, v_cache, tables, rows = paged_cache(lens, 16, 2, 32, dtype)
    k_cache, v_cache, tables = k_cache.nan_to_num(), v_cache.nan_to_num(), tables.clamp(min=0)
    qkv, turn, n = randn(batch, (group + 2) * 2 * 32, dtype=dtype), rotation(32, 64, dtype), ints(lens)
    slots = tables[rows.long(), (n - 1) // 16] * 16 + (n - 1) % 16
    context = Context(False, n - 1, slots, tables, rows, n, key_lens=lens)
    results = []
    for backend in (TorchBackend(), TritonBackend()):
        layer = Attention(2, 32, turn.cos_sin, turn.eps)
        layer.backend, layer.k_cache, layer.v_cache = backend, k_cache.clone(), v_cache.clone()
        context.gather = None
        results.append((layer(qkv, None, turn.q_weight, turn.k_weight, context), layer.k_cache, layer.v_cache))
    for one, other in zip(*results):
        assert_close(one, other)
    assert ["rotation" in options for options in launches] == [one_launch]


def test_splits_fill_the_device_at_small_batches_and_vanish_at_large_ones():
    assert [decode_splits(b, 8, True, 132) for b in (1, 2, 4, 8, 16, 32, 48, 64)] == [32, 32, 16, 8, 4, 2, 1, 1]
    assert [decode_splits(b, 8, False, 132) for b in (1, 2, 8, 32, 48, 64, 96, 256)] == [32, 32, 8, 4, 2, 2, 1, 1]
    cases = itertools.product((1, 7, 512), (1, 8, 64), (False, True), (1, 132))
    assert all(decode_splits(*case) >= 1 for case in cases)


@pytest.mark.skipif(DEVICE == "cpu", reason="a cache past 2^31 elements")
def test_offsets_past_31_bits_are_reached():
    blocks = 2**31 // (256 * 8 * 128) + 64
    k_cache, v_cache = torch.zeros(2, blocks, 256, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    k_cache[-1], v_cache[-1] = randn(2, 256, 8, 128, dtype=torch.bfloat16)
    q, tables = randn(1, 16, 128, dtype=torch.bfloat16), ints([[blocks - 1]])  # type: ignore[list-item]
    out = paged_decode_triton(q, k_cache, v_cache, tables, ints([0]), ints([256]), 0.1)
    assert_close(out, paged_decode_reference(q, k_cache, v_cache, tables, ints([0]), ints([256]), 0.1))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_graph_follows_the_lengths():
    caches = paged_cache([600, 900], 16, 2, 128, torch.bfloat16)
    q, lens = randn(2, 4, 128, dtype=torch.bfloat16), ints([600, 900])
    paged_decode_triton(q, *caches, lens, 0.1, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode_triton(q, *caches, lens, 0.1, 8)
    for new in ([600, 900], [1, 0], [64, 65], [599, 2]):
        lens.copy_(ints(new))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, paged_decode_reference(q, *caches, lens, 0.1))
