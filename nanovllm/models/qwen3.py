"""Qwen3 (dense): the forward pass over the tokens of one step, and where its weights are in a checkpoint.

Every token is a row; its position and its place in the cache are in the `Context`. It must not know of sequences, nor
whether a row belongs to a prompt or a completion. Invariant: the residual stream is the same on every rank, while
heads, MLP and vocabulary are split over them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear, Stream
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import rope_table
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.context import Context
from nanovllm.utils.parallel import Parallel


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: Tensor, parallel: Parallel, **factory: Any) -> None:
        super().__init__()
        rank, size, dim, hidden = parallel.rank, parallel.size, config.head_dim, config.hidden_size
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        my_heads, my_kv_heads = heads // size, max(1, kv_heads // size)
        first_kv_head = rank * kv_heads // size  # with fewer heads than ranks, neighbours share one
        q_share, kv_share = (rank * my_heads * dim, my_heads * dim), (first_kv_head * dim, my_kv_heads * dim)
        sizes, shares = [heads * dim, kv_heads * dim, kv_heads * dim], [q_share, kv_share, kv_share]
        eps = config.rms_norm_eps
        self.qkv_proj = ColumnParallelLinear(hidden, sizes, shares, bias, silu=False, eps=eps, **factory)
        self.o_proj = RowParallelLinear(heads * dim, hidden, q_share, bias, parallel, **factory)
        self.q_norm, self.k_norm = (RMSNorm(dim, eps, **factory) for _ in range(2))
        self.attn = Attention(my_kv_heads, dim, rope, eps)

    def forward(self, stream: Stream, context: Context) -> Stream:
        qkv, norm = self.qkv_proj(stream)
        return self.o_proj(self.attn(qkv, norm, self.q_norm.weight, self.k_norm.weight, context), stream.x)

    def load(self, checkpoint: Checkpoint, name: str, norm: str) -> None:
        self.qkv_proj.load(checkpoint, norm, f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.o_proj.load(checkpoint, f"{name}.o_proj")
        self.q_norm.load(checkpoint, f"{name}.q_norm")
        self.k_norm.load(checkpoint, f"{name}.k_norm")


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: Parallel, **factory: Any) -> None:
        super().__init__()
        hidden, total = config.hidden_size, config.intermediate_size
        size = parallel.share(total)
        share, eps = (parallel.rank * size, size), config.rms_norm_eps
        self.gate_up_proj = ColumnParallelLinear(hidden, [total] * 2, [share] * 2, False, silu=True, eps=eps, **factory)
        self.down_proj = RowParallelLinear(total, hidden, share, False, parallel, **factory)

    def forward(self, stream: Stream) -> Stream:
        product, _ = self.gate_up_proj(stream)  # with its norm: the activation has applied it
        return self.down_proj(product, stream.x)

    def load(self, checkpoint: Checkpoint, name: str, norm: str) -> None:
        self.gate_up_proj.load(checkpoint, norm, f"{name}.gate_proj", f"{name}.up_proj")
        self.down_proj.load(checkpoint, f"{name}.down_proj")


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each with the norm before it as part of its first product."""

    def __init__(self, config: ModelConfig, rope: Tensor, parallel: Parallel, **factory: Any) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, rope, parallel, **factory)
        self.mlp = Qwen3MLP(config, parallel, **factory)

    def forward(self, stream: Stream, context: Context) -> Stream:
        """Attention and MLP add to `stream` in place."""
        return self.mlp(self.self_attn(stream, context))

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        self.self_attn.load(checkpoint, f"{name}.self_attn", f"{name}.input_layernorm")
        self.mlp.load(checkpoint, f"{name}.mlp", f"{name}.post_attention_layernorm")


class Qwen3ForCausalLM(nn.Module):
    """The whole model of one rank."""

    def __init__(
        self, config: ModelConfig, max_model_len: int, parallel: Parallel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        vocabulary = (config.vocab_size, config.hidden_size, parallel)
        rope = rope_table(config.rope, config.head_dim, max_model_len, device)
        self.embed_tokens = VocabParallelEmbedding(*vocabulary, **factory)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rope, parallel, **factory) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if self.tied else VocabParallelEmbedding(*vocabulary, **factory)

    def forward(self, input_ids: Tensor, context: Context) -> Tensor:
        """[N] -> hidden states [N, hidden]."""
        stream = self.embed_tokens(input_ids)
        for layer in self.layers:
            stream = layer(stream, context)
        return self.norm(stream.x)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] -> this rank's share of the logits [N, share of the vocabulary], in `out` if given."""
        return self.lm_head.logits(hidden, out)

    def load(self, checkpoint: Checkpoint) -> None:
        """Read this rank's weights; `CheckpointError` if any is missing or has no place."""
        self.embed_tokens.load(checkpoint, "model.embed_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Qwen3DecoderLayer)
            layer.load(checkpoint, f"model.layers.{i}")
        self.norm.load(checkpoint, "model.norm")
        if not self.tied:
            self.lm_head.load(checkpoint, "lm_head")
        # a tied head may be stored a second time, and old checkpoints hold rope tables
        checkpoint.finish(ignored=("lm_head.weight", "rotary_emb.inv_freq") if self.tied else ("rotary_emb.inv_freq",))
