"""Context: what the layers need to know of one step beside the hidden states; tensors only.

It must not know of sequences. Invariant: made for one forward pass; in a captured decode it holds nothing of the host.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Context:
    """Inputs of one forward pass over N tokens of B sequences, on the model's device.

    A prefill holds the tokens of each sequence one after another; a decode one token a sequence.
    """

    is_prefill: bool
    positions: Tensor
    """[N] int32: position of each token in its sequence."""
    slot_mapping: Tensor
    """[N] int32: where each token's K/V go in the flattened cache; -1 stores nothing."""
    block_tables: Tensor
    """[S, max_blocks] int32: block ids of every slot."""
    rows: Tensor
    """[B] int32: the slot of each sequence, its row in `block_tables`."""
    context_lens: Tensor
    """[B] int32: keys each sequence attends to, those of this step included."""
    cu_seqlens_q: Tensor | None = None
    """[B + 1] int32, prefill only: where the tokens of each sequence begin."""
    query_lens: list[int] | None = None
    """Prefill only: tokens of each sequence in this step, on the host."""
    key_lens: list[int] | None = None
    """`context_lens` on the host: always in a prefill, in a decode only without graphs."""
    shared_len: Tensor | None = None
    """[1] int32, decode only: leading keys that all sequences have in the same blocks, where reading them once pays."""
    gather: list[Any] | None = None
    """What a backend works out in the first layer and uses in all of them."""
