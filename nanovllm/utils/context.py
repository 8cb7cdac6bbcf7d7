"""Context: what the layers need to know of one step beside the hidden states; tensors only.

It must not know of sequences. Invariant: made for one forward pass; in a captured decode it holds nothing of the host.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Context:
    """Inputs of one forward pass over N tokens of B sequences, on the model's device.

    A prefill holds the tokens of each sequence one after another; a decode one token a sequence.

    positions: [N] int32, of each token in its sequence.
    slot_mapping: [N] int32, where each token's K/V go in the flattened cache; -1 stores nothing.
    block_tables: [S, max_blocks] int32, block ids of every slot.
    rows: [B] int32, the slot of each sequence, its row in `block_tables`.
    context_lens: [B] int32, keys each sequence attends to, those of this step included.
    cu_seqlens_q: [B + 1] int32, prefill only: where the tokens of each sequence begin.
    query_lens: prefill only: tokens of each sequence in this step, on the host.
    key_lens: `context_lens` on the host: always in a prefill, in a decode only without graphs, else empty.
    shared_len: [1] int32, decode only: leading keys that all sequences have in the same blocks, where reading them once
        pays.
    gather: what a backend works out in the first layer and uses in all of them.
    """

    is_prefill: bool
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor | None = None
    query_lens: list[int] = field(default_factory=list)
    key_lens: list[int] = field(default_factory=list)
    shared_len: Tensor | None = None
    gather: list[Any] | None = None
