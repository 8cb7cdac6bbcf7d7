"""q/k norm + RoPE + store against its reference, and this against transformers' formula."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, ints, randn
from torch import Tensor

from nanovllm.kernels import rope
from nanovllm.kernels.norm import PendingNorm
from nanovllm.kernels.rope import norm_rope_store_reference, norm_rope_store_triton


def cos_sin_table(dim: int, length: int = 300) -> Tensor:
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)


def poisoned_caches(blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((2, blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("many", [2048, 5], ids=["a program a group", "a program a token"])
@pytest.mark.parametrize(
    "heads,kv_heads,dim,block_size",
    [(16, 8, 128, 256), (3, 3, 64, 16), (8, 1, 80, 48), (14, 2, 96, 16), (9, 3, 32, 48), (2, 1, 256, 16),
     (32, 8, 64, 16)],
)  # fmt: skip
def test_q_is_returned_and_k_and_v_are_stored_in_their_slots(
    heads, kv_heads, dim, block_size, many, dtype, monkeypatch
):
    monkeypatch.setattr(rope, "LARGE_PREFILL", many)
    slots = ints([3, -1, 2 * block_size - 1, 0, block_size])
    positions = ints([0, 5, 299, 1, 17])
    row = randn(5, (heads + 2 * kv_heads + 1) * dim, dtype=dtype)
    qkv = row[:, dim:]  # strided
    weights = [randn(dim, dtype=dtype, seed=s) for s in (1, 2)]
    ours = poisoned_caches(3, block_size, kv_heads, dim, dtype)
    q = norm_rope_store_triton(qkv, *weights, cos_sin_table(dim), positions, slots, *ours, 1e-6)
    theirs = poisoned_caches(3, block_size, kv_heads, dim, torch.float32)
    weights = [w.float() for w in weights]
    expected = norm_rope_store_reference(qkv.float(), *weights, cos_sin_table(dim), positions, slots, *theirs, 1e-6)
    assert q.shape == (5, heads, dim) and q.dtype == dtype
    assert_close(q, expected)
    written = ~theirs.isnan()
    assert written.sum() == 2 * 4 * kv_heads * dim
    assert torch.equal(~ours.isnan(), written)  # nothing else is touched
    assert_close(ours[0][written[0]], theirs[0][written[0]])
    assert torch.equal(ours[1][written[1]].float(), theirs[1][written[1]])  # values are copied


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 12, 16, 256])
def test_a_pending_norm_is_applied_before_those_of_heads_and_to_values(parts, dtype):
    heads, kv_heads, dim, rows = 4, 2, 64, 9
    qkv, squares = 1e-3 * randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype), randn(rows, parts, seed=3).square()
    factor = (squares.sum(1, keepdim=True) / (8 * parts) + 1e-3).rsqrt()
    weights = [randn(dim, seed=s) for s in (1, 2)]
    args = cos_sin_table(dim), ints([*range(rows)]), ints([*range(rows)])
    theirs = poisoned_caches(5, 16, kv_heads, dim, torch.float32)
    # the heads' epsilon is as large as their mean square: it tells whether the factor came first
    expected = norm_rope_store_reference(qkv.float() * factor, *weights, *args, *theirs, 1e-5)
    weights = [w.to(dtype) for w in weights]
    for norm_rope_store in (norm_rope_store_reference, norm_rope_store_triton):
        ours = poisoned_caches(5, 16, kv_heads, dim, dtype)
        q = norm_rope_store(qkv, *weights, *args, *ours, 1e-5, PendingNorm(squares, 8 * parts, 1e-3))
        assert q.dtype == dtype
        assert_close(q, expected)
        written = ~theirs.isnan()
        assert torch.equal(~ours.isnan(), written)
        assert_close(ours[written], theirs[written])


def test_the_reference_rotates_halves_as_transformers_does():
    dim, q, weight = 8, randn(1, 3 * 8), randn(8, seed=1)
    cos, sin = (t.repeat(2) for t in cos_sin_table(dim)[7].chunk(2))
    x = q[0, :dim] * torch.rsqrt(q[0, :dim].square().mean() + 1e-6) * weight
    expected = x * cos + torch.cat((-x[dim // 2 :], x[: dim // 2])) * sin
    caches = poisoned_caches(1, 16, 1, dim, torch.float32)
    out = norm_rope_store_reference(q, weight, weight, cos_sin_table(dim), ints([7]), ints([0]), *caches, 1e-6)
    torch.testing.assert_close(out[0, 0], expected)
