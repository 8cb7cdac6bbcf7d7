"""BlockManager: which KV blocks a sequence owns and which it can share; ids only, no tensors and no limits.

Paging: the K/V of a sequence lie in blocks of equally many tokens, anywhere in one pool, and its block table lists
them in order. So it grows a block at a time, and only its last block has unused room.

Hashing: a full block is addressed by a hash of its ids and of the block before it, so that a prompt finds the blocks of
its prefix. A hit also compares the ids and the identity of the parent's content: a hash collision never makes a wrong
hit. Freed blocks keep their content until they are reused, least recently used first.

Invariant: a block is free exactly when no block table holds it, and content that can be found never changes: only full
blocks are registered, and a sequence writes behind them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import xxhash

from nanovllm.engine.sequence import Sequence, pack_ids


@dataclass(slots=True)
class Block:
    """One physical block. `content_id` names the exact prefix it ends (0: no hashed content).

    key: chained hash, ids and the parent's `content_id`.
    """

    ref_count: int = 0
    key: tuple[int, bytes, int] = (0, b"", 0)
    content_id: int = 0


class BlockManager:
    """Owner of `num_blocks` blocks of `block_size` tokens.

    Invariant: a block is in `free` exactly when its reference count is 0, and the reference count is
    the number of block tables that hold it.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[tuple[int, bytes, int], int] = {}  # key -> the block that holds this content
        self.content_ids = count(1)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest known prefix; at least one token stays to be computed."""
        if not self.enable_prefix_caching:
            return []
        self._hash_blocks(seq)
        found: list[int] = []
        parent_id = 0
        for digest, ids in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
            if (block_id := self.cached.get((digest, ids, parent_id))) is None:
                break
            found.append(block_id)
            parent_id = self.blocks[block_id].content_id
        return found

    def num_free_after(self, prefix: list[int], num_tokens: int) -> int:
        """Free blocks left (negative: missing) once a sequence of `num_tokens` behind `prefix` has its blocks."""
        revived = sum(1 for block_id in prefix if self.blocks[block_id].ref_count == 0)
        return len(self.free) - revived - (-(-num_tokens // self.block_size) - len(prefix))

    def allocate(self, seq: Sequence, prefix: list[int]) -> None:
        """Give `seq` the shared blocks of `prefix` and fresh ones for all of its tokens."""
        for block_id in prefix:
            self.free.pop(block_id, None)
            self.blocks[block_id].ref_count += 1
        seq.block_table = list(prefix)
        seq.num_registered_blocks = len(prefix)
        seq.num_cached_tokens = len(prefix) * self.block_size
        for _ in range(-(-seq.num_tokens // self.block_size) - len(prefix)):
            self.append_block(seq)

    def append_block(self, seq: Sequence) -> None:
        """Add the least recently used free block to the table of `seq`; `KeyError` if none is free."""
        block_id, _ = self.free.popitem(last=False)
        block = self.blocks[block_id]
        if self.cached.get(block.key) == block_id:
            del self.cached[block.key]
        block.content_id = 0
        block.ref_count = 1
        seq.block_table.append(block_id)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        Their K/V must be written by a step that has been scheduled: a later launch reads them in
        stream order, and within one prefill a layer stores all K/V before it attends.
        """
        full = num_tokens // self.block_size
        if not self.enable_prefix_caching or seq.num_registered_blocks >= full:
            return
        self._hash_blocks(seq)
        for i in range(seq.num_registered_blocks, full):
            block = self.blocks[seq.block_table[i]]
            parent_id = self.blocks[seq.block_table[i - 1]].content_id if i else 0
            block.key = (*seq.block_hashes[i], parent_id)
            first = self.cached.setdefault(block.key, seq.block_table[i])  # this block, or one of the same content
            block.content_id = self.blocks[first].content_id or next(self.content_ids)
        seq.num_registered_blocks = full

    def release(self, seq: Sequence) -> None:
        """Take all blocks from `seq`, tail first, so that the start of a prefix is evicted last."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block_id] = None
                self.free.move_to_end(block_id, last=bool(block.content_id))
        seq.block_table = []
        seq.num_registered_blocks = seq.num_cached_tokens = 0

    def _hash_blocks(self, seq: Sequence) -> None:
        """Extend `seq.block_hashes` to all full blocks: xxh64(parent hash ‖ ids)."""
        size, done = self.block_size, len(seq.block_hashes)
        digest = seq.block_hashes[-1][0] if done else 0
        new = pack_ids(seq.token_ids[done * size : seq.num_tokens // size * size]).tobytes()
        for start in range(0, len(new), 4 * size):
            content = new[start : start + 4 * size]
            digest = xxhash.xxh64_intdigest(digest.to_bytes(8, "little") + content)
            seq.block_hashes.append((digest, content))
