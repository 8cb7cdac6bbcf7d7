"""The attention layer: q/k norm, rotary embedding and KV store, then attention over the paged cache.

It must not know how attention is computed, which is the backend's matter; in the decode of few sequences that is all of
it. Invariant: the K/V of all tokens of a prefill are stored before any is read, because its sequences may share blocks;
a decode reads no other sequence's new key.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention_decode import Rotation
from nanovllm.kernels.norm import PendingNorm
from nanovllm.kernels.rope import norm_rope_store
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.utils.context import Context


class Attention(nn.Module):
    """Attention of this rank's heads; the runner gives it its backend and its share of the KV cache.

    k_cache, v_cache: [blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(self, num_kv_heads: int, head_dim: int, rope: Tensor, eps: float) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.rope, self.eps = num_kv_heads, head_dim, rope, eps
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(
        self, qkv: Tensor, norm: PendingNorm | None, q_weight: Tensor, k_weight: Tensor, context: Context
    ) -> Tensor:
        """[N, (heads + 2 * kv_heads) * head_dim] -> [N, heads * head_dim].

        norm: that of the layer's input, if it is still to be applied to qkv; weights of the q/k norms.
        """
        cache = (self.k_cache, self.v_cache)
        if norm is None and not context.is_prefill:
            rotation = Rotation(q_weight, k_weight, self.rope, self.eps)
            out = self.backend.decode_qkv(qkv, *cache, context, self.scale, rotation)
            if out is not None:
                return out.flatten(1)
        q = norm_rope_store(
            qkv, q_weight, k_weight, self.rope, context.positions, context.slot_mapping, *cache, self.eps, norm
        )
        attend = self.backend.prefill if context.is_prefill else self.backend.decode
        return attend(q, *cache, context, self.scale).flatten(1)
