"""The embedding of a share of the vocabulary, against the reference and against the rows themselves."""

import pytest
import torch
from common import DEVICE, DTYPES, assert_close, ints, randn

from nanovllm.kernels.embedding import embed_reference, embed_triton

BOTH = pytest.mark.parametrize("embed", [embed_reference, embed_triton])


def embedded(embed, ids, weight, start):
    out = torch.full((len(ids), weight.shape[1]), 7.0, dtype=weight.dtype, device=DEVICE)
    return out, embed(ids, weight, start, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("n,hidden", [(1, 1024), (3, 200), (70, 64)])
def test_the_kernel_equals_the_reference(n, hidden, ids, dtype):
    weight = 3 * randn(50, hidden, dtype=dtype)
    args = ints([*range(20, 85), 19, -1, 70, 69, 20][-n:], ids), weight, 20
    (ours, squares), (theirs, expected) = embedded(embed_triton, *args), embedded(embed_reference, *args)
    assert torch.equal(ours, theirs) and squares.shape == expected.shape == (n, 1)
    assert_close(squares, expected)


@BOTH
def test_shares_add_up_to_the_rows(embed):
    weight, ids = randn(30, 96, dtype=torch.bfloat16), ints([29, 0, 10, 9, 29, 20])
    shares = [embedded(embed, ids, weight[start : start + 10], start) for start in (0, 10, 20)]
    assert torch.equal(sum(x for x, _ in shares), weight[ids.long()])
    # every id is in one share
    assert_close(sum(squares for _, squares in shares), weight[ids.long()].float().square().sum(1, keepdim=True))


@BOTH
def test_ids_of_other_shares_read_nothing(embed):
    """Also where they are so far off that there is no such memory."""
    ids, weight = ints([1 << 40, -(1 << 40), 5, 3], torch.int64), torch.full((2, 64), torch.nan, device=DEVICE)
    x, squares = embedded(embed, ids, weight, 3)
    assert not x[:3].any() and not squares[:3].any() and x[3].isnan().all()


def test_no_ids():
    x, squares = embedded(embed_triton, ints([]), randn(4, 32), 0)
    assert x.shape == (0, 32) and squares.shape == (0, 1)
