"""Attention backends: one interface over the paged KV cache, in plain PyTorch or by kernels.

A backend sees queries, the cache and the `Context`; it must not know of models or sequences. Invariant: all backends
give the same result within rounding, and one whose decode needs more of the host than shapes says so in `fits_graphs`.
"""

from abc import ABC, abstractmethod
from contextlib import suppress
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels._triton import LARGE_PREFILL
from nanovllm.kernels.attention_decode import MOST_ROTATED, Rotation, paged_decode, paged_decode_triton
from nanovllm.kernels.attention_prefill import paged_prefill
from nanovllm.kernels.attention_shared import shared_prefix_triton
from nanovllm.utils.context import Context


class AttentionBackend(ABC):
    """Causal attention of q [N, heads, head_dim] over a cache [blocks, block_size, kv_heads, head_dim].

    The K/V of the step are in the cache already. Both methods return [N, heads, head_dim].
    `fits_graphs`: `decode` needs nothing from the host but shapes, so it can be captured.
    """

    fits_graphs = True

    def reads_shared_prefix(self, batch: int, shared: int) -> bool:
        """Whether `decode` reads `shared` leading keys of `batch` sequences once, if the context says so."""
        return False

    @abstractmethod
    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        """Several tokens a sequence; the last token of each sees all of its keys."""

    @abstractmethod
    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        """One token a sequence."""

    def decode_qkv(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float, rotation: Rotation
    ) -> Tensor | None:  # fmt: skip
        """As `decode`, of qkv [N, (heads + 2 * kv_heads) * head_dim], whose K/V it stores; `None` if that is slower."""
        return None


class TorchBackend(AttentionBackend):
    """Gather and `scaled_dot_product_attention`: for CPUs, and the reference of the other backends."""

    fits_graphs = False  # it gathers as many keys as the longest sequence has
    group = 16  # sequences gathered at once in decode
    workspace = torch.empty(0)  # for what they gather; replaced by a larger one

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        if context.gather is None:
            parts = (slice(i, i + 1) for i in range(len(context.key_lens)))
            context.gather = [self._cache_index(context, part, k_cache.shape[1])[0] for part in parts]
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        outs = []
        for queries, index in zip(q.split(context.query_lens), context.gather):
            earlier = len(index) - len(queries)  # keys of tokens before those of this step
            mask = q.new_ones(len(queries), len(index), dtype=torch.bool).tril(earlier) if earlier else None
            q_i, k, v = (x.transpose(0, 1)[None] for x in (queries, keys[index], values[index]))
            out = F.scaled_dot_product_attention(q_i, k, v, mask, is_causal=not earlier, scale=scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        kv_heads, dim = k_cache.shape[2:]
        if context.gather is None:
            parts = (slice(start, start + self.group) for start in range(0, len(q), self.group))
            context.gather = [self._group_rows(context, part, *k_cache.shape[1:3]) for part in parts]
        # The heads of a group are queries of one key head: measured 2 to 7 times faster than `enable_gqa`.
        grouped = q.unflatten(1, (kv_heads, -1))
        out = torch.empty_like(grouped)
        for queries, part, (rows, mask) in zip(grouped.split(self.group), out.split(self.group), context.gather):
            size = rows.numel() * dim
            if self.workspace.numel() < 2 * size or self.workspace.dtype != q.dtype:
                # kept: fresh pages for every layer of every step cost more than the copy
                self.workspace = torch.empty(3 * size, dtype=q.dtype, device=q.device)
            k, v = self.workspace[: 2 * size].view(2, *rows.shape, dim)
            torch.index_select(k_cache.view(-1, dim), 0, rows.flatten(), out=k.view(-1, dim))
            torch.index_select(v_cache.view(-1, dim), 0, rows.flatten(), out=v.view(-1, dim))
            part.copy_(F.scaled_dot_product_attention(queries, k, v, mask, scale=scale))
        return out.flatten(1, 2)

    def _group_rows(self, context: Context, part: slice, block_size: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """For the sequences in `part`, which are padded to their longest only and stay in the processor's cache: rows
        [b, kv_heads, most keys] of the cache seen as [slots * kv_heads, head_dim], and a mask of the real keys."""
        index = self._cache_index(context, part, block_size)
        heads = torch.arange(kv_heads, device=index.device)[:, None]
        mask = torch.arange(index.shape[1], device=index.device) < context.context_lens[part, None]
        return index[:, None] * kv_heads + heads, mask[:, None, None]

    @staticmethod
    def _cache_index(context: Context, part: slice, block_size: int) -> Tensor:
        """[b, most keys] int64: where the keys of each sequence in `part` are in the flattened cache."""
        most = max(context.key_lens[part])
        tables = context.block_tables[context.rows[part], : -(-most // block_size)].long() * block_size
        index = tables[:, :, None] + torch.arange(block_size, device=tables.device)
        return index.flatten(1)[:, :most]


class TritonBackend(AttentionBackend):
    """Our own paged kernels: any NVIDIA GPU from compute capability 8.0 on, any block size."""

    def reads_shared_prefix(self, batch: int, shared: int) -> bool:
        return batch >= 32 and shared >= 512

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        assert context.cu_seqlens_q is not None
        return paged_prefill(
            q, k_cache, v_cache, context.block_tables, context.rows, context.cu_seqlens_q, context.context_lens,
            max(context.query_lens), scale,
        )  # fmt: skip

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        cache = (k_cache, v_cache, context.block_tables, context.rows)
        if context.shared_len is None:
            return paged_decode(q, *cache, context.context_lens, scale)
        prefix = (context.shared_len, *shared_prefix_triton(q, *cache, context.shared_len, scale))
        return paged_decode_triton(q, *cache, context.context_lens, scale, prefix=prefix)

    def decode_qkv(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float, rotation: Rotation
    ) -> Tensor | None:  # fmt: skip
        kv_heads, dim = k_cache.shape[2:]
        group = qkv.shape[1] // (kv_heads * dim) - 2
        # fp32 and larger groups have no registers left
        if len(qkv) > MOST_ROTATED or context.shared_len is not None or qkv.dtype == torch.float32 or group > 15:
            return None
        cache = (k_cache, v_cache, context.block_tables, context.rows)
        return paged_decode_triton(qkv, *cache, context.context_lens, scale, rotation=rotation)


class FlashAttentionBackend(AttentionBackend):
    """The flash-attn package, version 2 (`flash_attn.flash_attn_interface`) or 3 (`flash_attn_interface`).

    Its functions take the block tables of the batch, so the rows are gathered once a step.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        flash = import_module("flash_attn_interface" if version == 3 else "flash_attn.flash_attn_interface")
        self.varlen, self.with_kvcache = flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        tables = self._tables(context)
        if self.version == 3:
            # One split: left to itself it takes fp32 copies of the output, by lengths that no rehearsal has measured.
            return self.with_kvcache(
                q, k_cache, v_cache, cache_seqlens=context.context_lens, page_table=tables,
                cu_seqlens_q=context.cu_seqlens_q, max_seqlen_q=max(context.query_lens), softmax_scale=scale,
                causal=True, num_splits=1,
            )  # fmt: skip
        if context.gather is None or len(context.gather) < 2:
            context.gather = [tables, F.pad(context.context_lens.cumsum(0, dtype=torch.int32), (1, 0))]
        return self.varlen(
            q, k_cache, v_cache, context.cu_seqlens_q, context.gather[1], max(context.query_lens),
            max(context.key_lens), softmax_scale=scale, causal=True, block_table=tables,
        )  # fmt: skip

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        tables = {"page_table" if self.version == 3 else "block_table": self._tables(context)}
        return self.with_kvcache(
            q[:, None], k_cache, v_cache, cache_seqlens=context.context_lens, softmax_scale=scale, causal=True, **tables
        )[:, 0]

    @staticmethod
    def _tables(context: Context) -> Tensor:
        if context.gather is None:
            context.gather = [context.block_tables[context.rows]]
        return context.gather[0]


class FlashAttention4Backend(TritonBackend):
    """Our kernels, but large prefills by the package flash-attn-4 (`flash_attn.cute`), which compiles one for them.

    It has no split of the keys on Hopper, which decode needs, and takes the host 0.1 ms a launch. The cache is seen in
    pages of 128 tokens, which it loads whole, by TMA for heads of up to 128: all of the cache must be finite.
    """

    def __init__(self) -> None:
        self.varlen = import_module("flash_attn.cute").flash_attn_varlen_func

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        if len(q) < LARGE_PREFILL or len(context.rows) > 256:  # it takes other kernels for more sequences
            return super().prefill(q, k_cache, v_cache, context, scale)
        if context.gather is None:
            pages = k_cache.shape[1] // 128
            first = context.block_tables[context.rows][:, :, None] * pages
            context.gather = [(first + torch.arange(pages, dtype=torch.int32, device=q.device)).flatten(1)]
        k, v = (cache.view(-1, 128, *cache.shape[2:]) for cache in (k_cache, v_cache))
        # without `max_seqlen_q`, for which it has one kernel more
        return self.varlen(
            q, k, v, cu_seqlens_q=context.cu_seqlens_q, seqused_k=context.context_lens, page_table=context.gather[0],
            softmax_scale=scale, causal=True, num_splits=1,
        )[0]  # fmt: skip


def make_backend(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionBackend:
    """The backend `name`; `ValueError` if it cannot serve.

    "auto" is "torch" on a CPU and "triton" on a GPU, on Hopper with the prefill of flash-attn 3 or else 4 where it is
    installed and fits. "flash_attn" is version 3 or else 4 on Hopper, or else 2.
    Measured on an H200, of our kernels, flash-attn 3 and 2: decode of 256 x 1000 tokens 242, 261 and 353 us, prefill of
    2 x 8000 tokens 1,142, 795 and 1,785 us (16 heads of 128, 8 of K/V, blocks of 256).
    """
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        return TorchBackend()
    if device.type == "cpu":
        raise ValueError(f"attention_backend={name!r}: needs a CUDA device, this engine runs on the CPU")
    if name in ("auto", "triton") and find_spec("triton") is None:
        raise ValueError(f"attention_backend={name!r}: needs the package triton; use 'torch' or 'flash_attn'")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(f"attention_backend={name!r}: needs compute capability 8.0 or newer; use 'torch'")
    is_half = dtype in (torch.bfloat16, torch.float16)
    version, page = 2, 256
    if capability[0] == 9 and find_spec("flash_attn_interface"):
        version, page = 3, 1
    elif capability[0] == 9 and any(distributions(name="flash-attn-4")):  # flash-attn 2 has an old folder of that name
        version, page = 4, 128
    if name in ("auto", "triton"):
        backend = TritonBackend()
        if name == "auto" and is_half:
            with suppress(ImportError, OSError, AttributeError, RuntimeError):  # of what nobody asked for
                if version == 3:
                    backend.prefill = FlashAttentionBackend(3).prefill  # type: ignore[method-assign]
                elif version == 4 and block_size % page == 0:
                    backend = FlashAttention4Backend()
        return backend
    if not is_half:
        raise ValueError(f"attention_backend='flash_attn': must run in bfloat16 or float16, not {dtype}")
    # versions 2 and 4 are in this folder
    if version == 2 and not (find_spec("flash_attn") and find_spec("flash_attn.flash_attn_interface")):
        raise ValueError("attention_backend='flash_attn': needs the package: pip install 'nanovllm[flash-attn]'")
    if block_size % page:
        raise ValueError(f"kvcache_block_size={block_size}: must be a multiple of {page} with flash-attn {version}")
    return FlashAttention4Backend() if version == 4 else FlashAttentionBackend(version)
