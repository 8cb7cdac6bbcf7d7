"""What ranks send each other: sums with residual and squares, and sampled ids, against the plain references. The ranks
share a device; they take turns and find what the others send, or on a GPU run at once, each in a stream of its own."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, randn

from nanovllm.kernels.all_reduce import add_parts_reference
from nanovllm.kernels.sampling import sample, sample_with_scores_triton
from nanovllm.utils.parallel import HEAD_BYTES, PeerSums

CUDA = DEVICE == "cuda"
PART_BYTES = 1 << 20


class Memory:
    """In place of `PeerMemory`: of rank `rank`, a row of memory of the device that all share."""

    def __init__(self, rows: torch.Tensor, rank: int) -> None:
        self.rows, self.rank, self.addresses = rows, rank, [row.data_ptr() for row in rows]

    def tensor(self) -> torch.Tensor:
        return self.rows[self.rank]


def sent(bits: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """int32 -> the words of this turn."""
    return (turn & 0x3FFFFFFF | 0x40000000) << 32 | bits.long() & 0xFFFFFFFF


class Ranks:
    """`size` ranks on one device."""

    def __init__(self, size: int) -> None:
        rows = torch.zeros(size, HEAD_BYTES + 3 * PART_BYTES, dtype=torch.uint8, device=DEVICE)
        self.sums = [PeerSums(Memory(rows, rank), lambda mine: mine) for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)] if CUDA else []

    def add(self, parts: torch.Tensor, residuals: list[torch.Tensor], at_once: bool = False) -> list[torch.Tensor]:
        """parts [size, N, H]; residuals, of each rank, in place -> of each rank, the squares."""
        self.shared = shared = [sums.part(part) for sums, part in zip(self.sums, parts)]
        if at_once:
            squares = []
            torch.cuda.synchronize()
            for sums, stream, own, part, residual in zip(self.sums, self.streams, shared, parts, residuals):
                with torch.cuda.stream(stream):
                    own.copy_(part)
                    squares.append(sums.add(own, residual))
            torch.cuda.synchronize()
            return squares
        for own, part in zip(shared, parts):
            own.copy_(part)
        return [self.add_in_turn(rank, shared[rank], residuals[rank]) for rank in range(len(parts))]

    def add_in_turn(self, rank: int, part: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        ours, pairs = self.sums[rank], part.numel() // 2
        words, turns, *_ = ours.words
        few, turn = part.element_size() == 2 and pairs <= len(turns), turns[:pairs] + 1
        here, word = turn % 2, torch.arange(pairs, device=DEVICE)
        others = [other for other in range(len(self.sums)) if other != rank]
        ours.flags[:] = ours.turns + 1  # the others are there
        for other in others:
            self.sums[other].flags[rank] = 0
            if few:
                words[here, other, word] = sent(self.shared[other].reshape(-1).view(torch.int32), turn)
        squares = ours.add(part, residual)
        programs = squares.numel()
        assert not few or torch.equal(turns[:pairs], turn)
        for sums in (self.sums[other] for other in others):
            if few:
                own = sent(part.reshape(-1).view(torch.int32), turn)
                assert torch.equal(sums.words.words[here, rank, word], own)
            else:  # they have been told which turn of ours it was
                assert torch.equal(sums.flags[rank][:programs], ours.turns[:programs])
            assert not sums.flags[rank][0 if few else programs :].any()
        return squares


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "n", "h"),
    [(2, 1, 64), (4, 1, 4096), (3, 3, 600), (8, 2, 64), (2, 17, 256)]
    + CUDA * [(8, 2, 1536), (4, 16, 1536), (4, 70, 256), (2, 300, 128)],
)
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
    g = torch.Generator().manual_seed(0)
    ranks = Ranks(2)
    for call in range(202):
        # one after the other first: no kernel can be loaded while another one waits
        n = (1, 500)[call] if call < 2 else int(torch.randint(1, 500, (1,), generator=g))
        parts = randn(2, n, 1024, dtype=torch.bfloat16, seed=call)
        residuals = [randn(n, 1024, dtype=torch.bfloat16, seed=call + 1000) for _ in range(2)]
        expected = residuals[0].clone()
        add_parts_reference(list(parts), expected)
        ranks.add(parts, residuals, at_once=call >= 2)
        assert_close(residuals[0], expected)
        assert torch.equal(residuals[0], residuals[1])


def sampler_inputs(rows: int, vocab: int, call: int) -> tuple[torch.Tensor, ...]:
    logits = randn(rows, vocab, dtype=torch.bfloat16, seed=call)
    logits[::3] = logits[::3].round()  # many equals: the lowest id wins
    temperatures = torch.tensor([0.0, 0.8], device=DEVICE).repeat(rows)[:rows]
    return logits, temperatures, torch.arange(rows, device=DEVICE), torch.full((rows,), call, device=DEVICE)


@pytest.mark.parametrize("size", [2, 3])
def test_the_best_of_all_ranks_is_that_of_the_whole_vocabulary(size: int) -> None:
    """A rank finds what the others send, and afterwards they have what it has found in its own share."""
    ranks, rows, share = Ranks(size), 5, 400
    for call in range(4):
        logits, *args = sampler_inputs(rows, size * share, call)
        expected = sample(logits, *args)
        shares = [logits[:, rank * share : (rank + 1) * share] for rank in range(size)]
        own = []
        for rank, part in enumerate(shares):
            score, ids = sample_with_scores_triton(part, *args, vocab_offset=rank * share)
            # in units of the kernel: as it has them before they become nats
            score = torch.where(args[0] > 0, (score - 0.36651292) * 1.4426950408889634, score)
            own.append(torch.stack([score.view(torch.int32), ids.int()], 1).flatten())
        for rank, sums in enumerate(ranks.sums):
            words, turns, *_ = sums.best
            turn = turns[0] + 1
            for other in range(size):
                words[turn % 2, other, : 2 * rows] = sent(own[other], turn) if other != rank else 0
            _, ids = sample_with_scores_triton(shares[rank], *args, vocab_offset=rank * share, peers=sums.best)
            assert torch.equal(ids, expected)
            for other, theirs in enumerate(ranks.sums):
                if other != rank:
                    got = theirs.best.words[turn % 2, rank, : 2 * rows]
                    assert (got >> 32 == turn | 0x40000000).all()
                    assert torch.equal(got[1::2] & 0xFFFFFFFF, own[rank][1::2].long())
