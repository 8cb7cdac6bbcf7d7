"""What the kernel tests share: a device, tolerances, and a paged cache filled at random."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_close(out: Tensor, ref: Tensor) -> None:
    """‖out − ref‖ / ‖ref‖ within the tolerance of out's type; NaN never passes."""
    assert out.shape == ref.shape
    error = (out.float() - ref.float()).norm() / ref.float().norm().clamp(min=1e-30)
    assert error <= TOLERANCE[out.dtype], f"relative error {error.item():.2e}"


def paged_cache(
    lens: list[int], block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k_cache, v_cache, block_tables, rows) for sequences of these lengths: blocks in random order, tables of another
    row order with rows to spare, -1 past the end; whatever no sequence owns is NaN."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lens]
    blocks = torch.randperm(sum(counts) + 2, generator=g).int()
    rows = torch.randperm(len(lens) + 2, generator=g)[: len(lens)].int()
    tables = torch.full((len(lens) + 2, max(counts) + 1), -1, dtype=torch.int32)
    caches = torch.full((2, sum(counts) + 2, block_size, kv_heads, dim), float("nan"))
    used = 0
    for row, n, count in zip(rows.tolist(), lens, counts, strict=True):
        tables[row, :count] = blocks[used : used + count]
        for i in range(count):
            m = min(n - i * block_size, block_size)
            caches[:, blocks[used + i].item(), :m] = torch.randn(2, m, kv_heads, dim, generator=g)
        used += count
    k_cache, v_cache = caches.to(DEVICE, dtype)
    return k_cache, v_cache, tables.to(DEVICE), rows.to(DEVICE)
