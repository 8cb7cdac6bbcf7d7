"""Sum over ranks, residual and squares, against the plain reference. On a GPU each rank has a stream; on a CPU they
take turns, and find the flags of the others set."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn

from nanovllm.kernels.all_reduce import PROGRAMS, add_parts_reference, add_parts_triton

CUDA = DEVICE == "cuda"
PART_BYTES = 1 << 20


class Ranks:
    """`size` ranks with memory on one device, laid out as that of `PeerSums`."""

    def __init__(self, size: int) -> None:
        flag_bytes = size * PROGRAMS * 8
        memory = torch.zeros(size, flag_bytes + 2 * PART_BYTES, dtype=torch.uint8, device=DEVICE)
        self.flags = [m[:flag_bytes].view(torch.int64).view(size, PROGRAMS) for m in memory]
        self.parts = [m[flag_bytes:].view(2, PART_BYTES) for m in memory]
        self.turns = [torch.zeros(PROGRAMS, dtype=torch.int64, device=DEVICE) for _ in range(size)]
        place = torch.arange(size, device=DEVICE) * memory.stride(0)
        self.deltas = [place - place[rank] for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)] if CUDA else [None] * size
        self.calls = 0

    def add(self, parts: torch.Tensor, residuals: list[torch.Tensor]) -> list[torch.Tensor]:
        """parts [size, N, H]; residuals, of each rank, in place -> of each rank, the squares."""
        self.calls += 1
        shared = [p[self.calls % 2, : parts[0].nbytes].view(parts.dtype).view(parts[0].shape) for p in self.parts]
        squares = []
        if not CUDA:
            for own, part in zip(shared, parts):
                own.copy_(part)
        for rank, stream in enumerate(self.streams):
            if CUDA:
                stream.wait_stream(torch.cuda.current_stream())
            else:
                self.flags[rank][:] = self.turns[rank] + 1  # the others are there
                for flags in self.flags[:rank] + self.flags[rank + 1 :]:
                    flags[rank] = 0
            with torch.cuda.stream(stream):
                if CUDA:
                    shared[rank].copy_(parts[rank])
                args = residuals[rank], self.flags[rank], self.turns[rank], self.deltas[rank], rank
                squares.append(add_parts_triton(shared[rank], *args))
            if not CUDA:  # they have been told which turn of ours it was
                for flags in self.flags[:rank] + self.flags[rank + 1 :]:
                    assert torch.equal(flags[rank][: squares[rank].numel()], self.turns[rank][: squares[rank].numel()])
                    assert not flags[rank][squares[rank].numel() :].any()
        if CUDA:
            torch.cuda.synchronize()
        return squares


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "h"), [(1, 64), (1, 4096), (3, 1000), (16, 1536), (70, 256), (300, 128)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_same_sum_and_its_squares(size: int, n: int, h: int, dtype: torch.dtype) -> None:
    ranks = Ranks(size)
    residual = randn(n, h, dtype=dtype, seed=9)
    residuals = [residual.clone() for _ in range(size)]
    for call in range(3):
        parts = randn(size, n, h, dtype=dtype, seed=call)
        expected = residuals[0].clone()
        add_parts_reference(list(parts), expected)
        squares = ranks.add(parts, residuals)
        for rank in range(size):
            assert_close(residuals[rank], expected)
            assert torch.equal(residuals[rank], residuals[0])
            assert_close(squares[rank].sum(1, keepdim=True), residuals[rank].float().square().sum(1, keepdim=True))


@pytest.mark.skipif(not CUDA, reason="ranks that really wait for each other")
def test_calls_of_all_sizes_one_after_the_other() -> None:
    ranks = Ranks(2)
    g = torch.Generator().manual_seed(0)
    for call in range(200):
        n = int(torch.randint(1, 256, (1,), generator=g))
        parts = randn(2, n, 1024, dtype=torch.bfloat16, seed=call)
        residuals = [randn(n, 1024, dtype=torch.bfloat16, seed=call + 1000) for _ in range(2)]
        expected = residuals[0].clone()
        add_parts_reference(list(parts), expected)
        ranks.add(parts, residuals)
        assert_close(residuals[0], expected)
        assert torch.equal(residuals[0], residuals[1])
