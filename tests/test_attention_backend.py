"""Attention backends: which one serves what, and the flash-attn calls against a stand-in of the package."""

import sys
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.engine.model_runner import ModelRunner, _graph_sizes
from nanovllm.kernels.attention_decode import MOST_ROTATED, decode_config, decode_splits, paged_decode_reference
from nanovllm.kernels.attention_prefill import paged_prefill_reference
from nanovllm.layers import attention_backend
from nanovllm.layers.attention_backend import (
    AttentionBackend,
    FlashAttention4Backend,
    TorchBackend,
    TritonBackend,
    make_backend,
)
from nanovllm.utils.context import Context

# The functions of the package with the parameters that its documentation gives them, as far as they may be used here.


def attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, starts: Tensor | None, lens: Tensor, scale: float
) -> Tensor:
    for x in (tables, lens, *([] if starts is None else [starts])):
        assert x.dtype == torch.int32 and x.is_contiguous()
    assert len(tables) == len(lens)
    rows = torch.arange(len(lens), dtype=torch.int32)
    if starts is None:
        return paged_decode_reference(q[:, 0], k, v, tables, rows, lens, scale)[:, None]
    return paged_prefill_reference(q, k, v, tables, rows, starts, lens, int(starts.diff().max()), scale)


def varlen_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    *, block_table=None,
):  # fmt: skip
    assert causal and max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert cu_seqlens_k[0] == 0 and cu_seqlens_k.dtype == torch.int32
    return attend(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale)


def with_kvcache_2(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale=None, causal=False, num_splits=0):
    return attend(q, k_cache, v_cache, block_table, None, cache_seqlens, softmax_scale)


def varlen_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale=None, causal=False):
    raise AssertionError("takes no page table")


def with_kvcache_3(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None,
    causal=False, num_splits=0,
):  # fmt: skip
    if cu_seqlens_q is not None:  # splits take memory by lengths, which the engine has not measured
        assert causal and max_seqlen_q == cu_seqlens_q.diff().max() and num_splits == 1
    return attend(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale)


def varlen_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *, seqused_k=None,
    page_table=None, softmax_scale=None, causal=False, num_splits=0, return_lse=False,
):  # fmt: skip
    assert causal and num_splits == 1  # it cannot split on Hopper
    assert k.shape[1] == 128 and max_seqlen_q is None  # one kernel for all lengths, by TMA
    return attend(q, k, v, page_table, cu_seqlens_q, seqused_k, softmax_scale), None


FLASH_2, FLASH_3, FLASH_4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute"
OLD_CUTE = "flash_attn.cute.interface"  # part of flash-attn 2.8
FLASH = {
    FLASH_2: {"flash_attn_varlen_func": varlen_2, "flash_attn_with_kvcache": with_kvcache_2},
    FLASH_3: {"flash_attn_varlen_func": varlen_3, "flash_attn_with_kvcache": with_kvcache_3},
    FLASH_4: {"flash_attn_varlen_func": varlen_4},
    "flash_attn": {},
}
CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes this process believe in a GPU of a compute capability with these packages."""

    def believe(capability: tuple[int, int], *packages: str) -> None:
        def distributions(name: str) -> list[str]:
            return [name] if name == "flash-attn-4" and FLASH_4 in packages else []

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(attention_backend, "distributions", distributions)
        for name, functions in FLASH.items():
            monkeypatch.setitem(sys.modules, name, None)  # not to be found, even if it is installed
            if any(f"{package}.".startswith(f"{name}.") for package in packages):
                module = ModuleType(name)
                module.__spec__ = ModuleSpec(name, None)
                module.__dict__.update(functions)
                monkeypatch.setitem(sys.modules, name, module)

    return believe


def make(dtype: torch.dtype = torch.bfloat16, block_size: int = 256, name: str = "flash_attn") -> AttentionBackend:
    return make_backend(name, CUDA, dtype, block_size)


def version_of(method) -> int | None:
    backend = method.__self__
    return 4 if isinstance(backend, FlashAttention4Backend) else getattr(backend, "version", None)


@pytest.mark.parametrize(
    ("capability", "packages", "version"),
    [
        ((9, 0), (FLASH_2, FLASH_3, FLASH_4), 3), ((9, 0), (FLASH_3,), 3), ((9, 0), (FLASH_2, FLASH_4), 4),
        ((9, 0), (FLASH_4,), 4), ((9, 0), (FLASH_2,), 2), ((9, 0), (FLASH_2, OLD_CUTE), 2),
        ((8, 0), (FLASH_2, FLASH_3, FLASH_4), 2), ((10, 0), (FLASH_2, FLASH_3, FLASH_4), 2),
    ],
)  # fmt: skip
def test_flash_attn_3_and_4_serve_hopper_and_2_the_rest(machine, capability, packages, version):
    machine(capability, *packages)
    backend = make(block_size={2: 256, 3: 16, 4: 128}[version])
    assert version_of(backend.prefill) == version and isinstance(backend, TritonBackend) == (version == 4)


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "block_size", "version"),
    [
        ((9, 0), (FLASH_3,), torch.bfloat16, 16, 3), ((9, 0), (FLASH_3, FLASH_4), torch.float16, 256, 3),
        ((9, 0), (FLASH_2, FLASH_4), torch.float16, 384, 4), ((9, 0), (FLASH_4,), torch.bfloat16, 128, 4),
        ((9, 0), (FLASH_4,), torch.bfloat16, 64, None), ((9, 0), (FLASH_3, FLASH_4), torch.float32, 256, None),
        ((9, 0), (FLASH_2,), torch.bfloat16, 256, None), ((9, 0), (FLASH_2, OLD_CUTE), torch.bfloat16, 256, None),
        ((8, 0), (FLASH_3, FLASH_4), torch.bfloat16, 256, None),
        ((10, 0), (FLASH_3, FLASH_4), torch.bfloat16, 256, None),
    ],
)  # fmt: skip
def test_auto_takes_the_prefill_of_flash_attn_3_or_4_where_it_fits(
    machine, capability, packages, dtype, block_size, version
):
    machine(capability, *packages)
    for name in ("auto", "triton"):
        backend = make(dtype, block_size, name)
        assert isinstance(backend, TritonBackend) and backend.decode.__func__ is TritonBackend.decode
        assert version_of(backend.prefill) == (version if name == "auto" else None)


@pytest.mark.parametrize("package", [FLASH_3, FLASH_4])
def test_auto_does_without_a_flash_attn_that_is_broken(machine, monkeypatch, package):
    machine((9, 0), package)

    def fail(name: str):
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(attention_backend, "import_module", fail)
    assert make(name="auto").prefill.__self__.__class__ is TritonBackend
    with pytest.raises(ImportError, match="undefined symbol"):
        make()


def test_what_flash_attn_cannot_serve_is_refused_with_the_field(machine):
    machine((9, 0), *FLASH)
    with pytest.raises(ValueError, match=r"attention_backend='flash_attn'.* float16, not torch\.float32"):
        make(torch.float32)
    machine((8, 6), *FLASH)
    with pytest.raises(ValueError, match="kvcache_block_size=16: must be a multiple of 256"):
        make(block_size=16)
    machine((9, 0), FLASH_2, FLASH_4)
    with pytest.raises(ValueError, match="kvcache_block_size=64: must be a multiple of 128 with flash-attn 4"):
        make(block_size=64)
    for packages in ((), (FLASH_3, FLASH_4)):
        machine((8, 6), *packages)
        with pytest.raises(ValueError, match=r"attention_backend='flash_attn': .*pip install 'nanovllm\[flash-attn\]'"):
            make()
    machine((7, 5), *FLASH)
    for name in ("flash_attn", "triton", "auto"):
        with pytest.raises(ValueError, match=f"attention_backend='{name}': needs compute capability"):
            make(name=name)


def assert_same(backend: AttentionBackend, query_lens: list[int], key_lens: list[int]) -> None:
    """Two layers of a prefill, and of a decode, are those of the reference."""
    torch.manual_seed(0)
    reference = TorchBackend()
    k, v = torch.randn(2, 5, 256, 2, 32)
    slots = torch.tensor([[4, 0], [0, 0], [1, 3], [2, 0]], dtype=torch.int32)
    rows = torch.tensor([2, 3, 0], dtype=torch.int32).repeat(len(query_lens) // 3)
    lens = torch.tensor(key_lens, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    for one, batch in (
        (False, Context(True, lens, lens, slots, rows, lens, starts, query_lens, key_lens)),
        (True, Context(False, lens, lens, slots, rows, lens, key_lens=key_lens)),
    ):
        q = torch.randn(len(rows) if one else sum(query_lens), 4, 32)
        outs = []
        for b in (reference, backend):
            batch.gather = None
            for _ in range(2):  # layers: the second finds what the first has kept
                outs.append((b.decode if one else b.prefill)(q, k, v, batch, 0.3))
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize("package", [FLASH_2, FLASH_3])
def test_flash_attn_gets_what_its_functions_take(machine, package):
    machine((9, 0), package)
    assert_same(make(), [20, 1, 40], [300, 7, 40])


def test_flash_attn_4_gets_large_prefills_only_in_pages_of_its_tile(machine, monkeypatch):
    machine((9, 0), FLASH_4)
    monkeypatch.setattr(attention_backend, "LARGE_PREFILL", 61)
    backend = make()
    calls = []
    varlen = backend.varlen
    backend.varlen = lambda *args, **options: calls.append(len(args[0])) or varlen(*args, **options)
    assert_same(backend, [20, 1, 40], [300, 7, 40])
    assert calls == [61, 61]
    assert_same(backend, [20, 1, 39], [300, 7, 40])  # few tokens
    assert_same(backend, [1] * 258, [300, 7, 40] * 86)  # many sequences
    assert calls == [61, 61]


@pytest.mark.parametrize("num_sms", [46, 108, 132])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (4, 2), (8, 4), (4, 4), (2, 4), (1, 8), (16, 1)])
def test_a_rehearsal_has_each_decode_kernel_that_a_graph_needs(kv_heads: int, group: int, num_sms: int) -> None:
    """Those of a shared prefix are captured when they are first used: a request would wait for the compiler."""

    def kernel(batch: int, shared: bool) -> tuple[Any, ...]:
        rotate = not shared and batch <= MOST_ROTATED
        splits = 1 if shared else decode_splits(batch, kv_heads, rotate, num_sms)
        programs, device = batch * kv_heads * splits, torch.device("cpu")
        return shared, rotate, splits > 1, decode_config(programs, splits, group, 128, 2, rotate, num_sms, device)

    rehearsed = set()
    runner: Any = SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=512, max_model_len=4096, max_num_batched_tokens=8192),
        backend=TritonBackend(), dtype=torch.bfloat16, controls=SimpleNamespace(rehearse=lambda dtype: None),
        reads_shared=False, _run_prefill=lambda total, longest: None,
        _decode_padding=lambda size: rehearsed.add(kernel(size, runner.reads_shared)),
    )  # fmt: skip
    ModelRunner._rehearse(runner)
    for shared in (False, True):
        sizes = [n for n in _graph_sizes(512) if not shared or runner.backend.reads_shared_prefix(n, 4096)]
        assert {kernel(n, shared) for n in sizes} <= rehearsed
    assert not runner.reads_shared
