"""Truncation: top_k, top_p, min_p; the kernel against the reference, the reference against plain sorting."""

import math

import pytest
import torch
from common import DEVICE, DTYPES

from nanovllm.kernels.truncation import truncate_reference, truncate_triton

# of the interpreter's numpy: masked logits weigh -inf * 0, the least finite one is scaled
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
BOTH = pytest.mark.parametrize("truncate", [truncate_reference, truncate_triton])


def cut(truncate, logits, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, **kwargs):
    """The logits that stay, for parameters of one row or of all."""
    logits = logits.clone().to(DEVICE)
    t, p, m = (torch.as_tensor(v, device=DEVICE).float().expand(len(logits)) for v in (temperature, top_p, min_p))
    k = torch.as_tensor(top_k, device=DEVICE).int().expand(len(logits))
    truncate(logits, t.contiguous(), k.contiguous(), p.contiguous(), t * m.log(), **kwargs)
    return logits


def kept(truncate, row, **kwargs):
    (out,) = cut(truncate, torch.tensor([row]), **kwargs)
    return out.isfinite().nonzero().flatten().tolist()


def random_case(i: int, rows: int, vocab: int, dtype: torch.dtype):
    """Rows of many kinds: rounded to make ties, with -inf, all equal; parameters on and off."""
    g = torch.Generator().manual_seed(i)
    scale = torch.tensor([0.3, 2.0, 8.0])[torch.arange(rows) % 3]
    logits = torch.randn(rows, vocab, generator=g) * scale[:, None]
    logits[1::4] = logits[1::4].round()
    logits[2::4].masked_fill_(torch.rand(logits[2::4].shape, generator=g) < 0.5, -math.inf)
    logits[3::8] = -2.5
    k = torch.randint(0, vocab + 3, (rows,), generator=g)
    k[::2] = torch.tensor([0, 1, 2, 5, 20])[torch.randint(0, 5, (len(k[::2]),), generator=g)]
    p = (torch.rand(rows, generator=g) * 1.4).clamp(1e-9, 1)
    m = (torch.rand(rows, generator=g) * 0.6 - 0.3).clamp(min=0)
    t = torch.tensor([0.6, 1.0, 0.0, 2.0, 0.05])[torch.randint(0, 5, (rows,), generator=g)]
    return logits.to(dtype), {"top_k": k, "top_p": p, "min_p": m, "temperature": t}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,vocab,config", [(16, 40, (16, 1)), (16, 400, (16, 4)), (8, 1000, (128, 4))])
def test_the_kernel_keeps_what_the_reference_keeps(rows, vocab, config, dtype):
    logits, params = random_case(vocab, rows, vocab, dtype)
    out, ref = cut(truncate_triton, logits, **params, config=config), cut(truncate_reference, logits, **params)
    assert torch.equal(out, ref)
    assert (out.isfinite() | out.isneginf()).all() and out.dtype == dtype


def by_kind(vocab: int):
    """A row of different logits, one full of ties, one with few that are finite, one of two neighbours in bf16."""
    x = 3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    x[1] = x[1].round()
    x[2].masked_fill_(torch.arange(vocab) % 100 != 7, -math.inf)
    x[3] = 1.0
    x[3, ::115] += 2**-7
    return x


@pytest.mark.parametrize(
    "dtype,k,p,m",
    [
        (torch.bfloat16, [1, 5, 30, 30], 1.0, 0.0),
        (torch.bfloat16, [64, 65, 64, 2303], [1.0, 0.7, 0.9, 1.0], [0.0, 0.1, 0.3, 0.0]),
        (torch.bfloat16, 0, [0.97, 0.3, 0.05, 0.5], [0.0, 0.0, 0.01, 0.2]),
        (torch.float32, [64, 5, 2, 1], [0.6, 0.9, 1.0, 0.5], [0.0, 0.3, 0.0, 0.9]),
        (torch.float32, [0, 0, 40, 0], [0.98, 0.01, 0.5, 0.999], 0.0),
    ],
)
def test_the_kernel_agrees_where_candidates_fit_and_where_they_do_not(dtype, k, p, m):
    """Tiles of 128 logits, and room for 16 of candidates, which are collected for k up to 64."""
    logits = by_kind(128 * 18).to(dtype)
    params = {"top_k": k, "top_p": p, "min_p": m, "temperature": 0.8}
    out, ref = cut(truncate_triton, logits, **params, config=(16, 1)), cut(truncate_reference, logits, **params)
    assert torch.equal(out, ref)


def test_ties_stay_whose_share_is_top_p_within_rounding():
    """Of too many to be collected: the sums that choose the interval and those that search it differ in their order."""
    g = torch.Generator().manual_seed(13)
    x = (torch.randn(20, 128, generator=g) * 0.5 - 2).clamp(max=1.5)
    x[:, :16] = 2.0
    for _ in range(12):
        i, j = (int(torch.randint(0, n, (1,), generator=g)) for n in (20, 16))
        x[i, j] = 2.05 + 2 * torch.rand(1, generator=g).item()
    x[3, 5] = 4.0
    logits = x.view(1, -1).bfloat16()
    weights = ((logits.double() - 4) / 0.7).exp()
    share = (weights[logits >= 2].sum() / weights.sum()).float()
    p = torch.stack([share, share.nextafter(torch.tensor(1.0))])
    out = cut(truncate_triton, logits.expand(2, -1), top_p=p, temperature=0.7, config=(16, 1))
    assert (out.isfinite().sum(1) >= 320).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="a vocabulary of this size is for a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [151936, 151001])
def test_the_kernel_keeps_what_the_reference_keeps_of_a_large_vocabulary(vocab, dtype):
    for seed in range(4):
        logits, params = random_case(seed, 64, vocab, dtype)
        out, ref = cut(truncate_triton, logits, **params), cut(truncate_reference, logits, **params)
        # sums of fp32 may put a token on the other side of top_p
        assert ((out != ref).sum(1) <= 1).all() and (out != ref).sum() <= 4


def naive(row, k, p, m, t):
    """By the definition, over Python floats."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weight = [math.exp((row[i] - row[order[0]]) / t) for i in order]
    order = [i for i, w in zip(order, weight) if w >= m * weight[0]][: k or len(row)]
    total, mass, out = sum(weight[: len(order)]), 0.0, []
    for i, w in zip(order, weight):
        out.append(i)
        mass += w
        if p < 1 and mass >= p * total:
            break
    return sorted(out)


def test_the_reference_keeps_what_sorting_keeps():
    for i in range(30):
        logits, params = random_case(i, 8, 60, torch.float32)
        out = cut(truncate_reference, logits, **params)
        for row, result, *args in zip(logits.tolist(), out, *(v.tolist() for v in params.values())):
            expected = naive(row, *args) if args[-1] > 0 else range(60)
            assert result.isfinite().nonzero().flatten().tolist() == [j for j in expected if row[j] > -math.inf]


@BOTH
def test_of_equal_logits_the_lowest_ids_stay_and_exactly_k(truncate):
    assert kept(truncate, [1.0, 3.0, 3.0, 2.0, 3.0, 2.0], top_k=2) == [1, 2]
    assert kept(truncate, [1.0, 3.0, 3.0, 2.0, 3.0, 2.0], top_k=4) == [1, 2, 3, 4]
    assert kept(truncate, [0.0] * 40, top_k=33) == list(range(33))
    assert kept(truncate, [0.0, -0.0] * 20, top_k=7) == list(range(7))


@BOTH
def test_the_token_that_crosses_top_p_stays(truncate):
    row = [math.log(w) for w in (0.1, 0.4, 0.3, 0.2)]
    assert kept(truncate, row, top_p=0.39) == [1]
    assert kept(truncate, row, top_p=0.41) == [1, 2]
    assert kept(truncate, row, top_p=0.99) == [0, 1, 2, 3]
    assert kept(truncate, row, top_p=1e-9) == kept(truncate, row, top_p=0.0) == [1]
    assert kept(truncate, [0.0] * 8, top_p=0.0) == [0]
    assert kept(truncate, [0.0] * 8, top_p=0.5) == [0, 1, 2, 3]


@BOTH
def test_min_p_keeps_all_equals_and_top_p_is_a_share_of_what_is_left(truncate):
    row = [math.log(w) for w in (0.1, 0.4, 0.3, 0.1999)]
    assert kept(truncate, row, min_p=0.5) == [1, 2]
    assert kept(truncate, row, min_p=0.25) == [0, 1, 2, 3]
    assert kept(truncate, [2.0, 1.0, 2.0], min_p=1.0) == [0, 2]
    assert kept(truncate, row, top_p=0.6) == [1, 2]
    assert kept(truncate, row, top_p=0.56, top_k=2) == [1]  # 0.4 / 0.7
    assert kept(truncate, row, top_p=0.56, min_p=0.6) == [1]
    assert kept(truncate, row, temperature=0.1, min_p=0.5) == [1]


@BOTH
def test_rows_without_limits_with_temperature_zero_or_without_a_finite_best_stay_as_they_are(truncate):
    logits = torch.randn(5, 30)
    logits[3] = -math.inf
    logits[4, 5] = math.inf
    k, p = [0, 30, 1, 5, 5], [1.0, 1.0, 0.1, 0.5, 0.5]
    out = cut(truncate, logits, top_k=k, top_p=p, temperature=[1.0, 1.0, 0.0, 1.0, 1.0])
    assert torch.equal(out.cpu(), logits)
