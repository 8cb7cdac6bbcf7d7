"""The inputs of a decode step against the reference and against numbers worked out by hand."""

import pytest
import torch
from common import DEVICE, ints, randn

from nanovllm.kernels.step_inputs import decode_inputs_reference, decode_inputs_triton


def outputs(batch: int):
    return [torch.full((batch,), -7, dtype=torch.int32, device=DEVICE) for _ in range(4)]


@pytest.mark.parametrize("decode_inputs", [decode_inputs_reference, decode_inputs_triton])
def test_two_sequences_and_a_padding_row(decode_inputs):
    tables = torch.stack((ints([4, 9, -1]), ints([2, 3, 7]), ints([-1, -1, -1]), ints([-1, -1, -1])))
    lens, last = ints([16, 47, 5, 0]), ints([100, 101, 102, 0], torch.int64)
    out = outputs(4)
    decode_inputs(ints([1, 0, 3, 3]), last, lens, tables, 16, *out)
    ids, positions, slots, context_lens = (t.tolist() for t in out)
    assert ids == [101, 100, 0, 0] and positions == [47, 16, 0, 0]
    assert slots == [7 * 16 + 15, 9 * 16, -1, -1] and context_lens == [48, 17, 0, 0]
    assert lens.tolist() == [17, 48, 5, 0]  # the row that is not in the step, and the padding row, stay


@pytest.mark.parametrize("batch", [1, 128, 300])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_the_kernel_equals_the_reference(batch, block_size):
    g = torch.Generator().manual_seed(batch)
    size, blocks = 330, 5
    lens = torch.randint(0, block_size * blocks, (size + 1,), generator=g).int().to(DEVICE)
    last = torch.randint(0, 1 << 40, (size + 1,), generator=g).to(DEVICE)
    tables = torch.randint(0, 1000, (size + 1, blocks), generator=g).int().to(DEVICE)
    rows = torch.randperm(size, generator=g)[:batch].int().to(DEVICE)
    rows[-1 if batch == 1 else slice(-3, None)] = size
    ours, theirs, lens2 = outputs(batch), outputs(batch), lens.clone()
    decode_inputs_triton(rows, last, lens, tables, block_size, *ours)
    decode_inputs_reference(rows, last, lens2, tables, block_size, *theirs)
    assert all(torch.equal(a, b) for a, b in zip([*ours, lens], [*theirs, lens2], strict=True))


def test_an_empty_batch_changes_nothing():
    lens = ints([3, 0])
    decode_inputs_triton(ints([]), ints([1, 0], torch.int64), lens, ints([[0], [0]]), 16, *outputs(0))  # type: ignore[list-item]
    assert lens.tolist() == [3, 0] and randn(1).numel() == 1
