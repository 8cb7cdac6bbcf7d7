"""Slots: the state of the running sequences that lives on the device, one row a sequence.

A prefill sends it with the ids to compute. A decode step derives all of its inputs from here, so the host sends only
what changed: who takes part, and new blocks. Sampled ids are written back here and never wait for the host. It must
not choose which sequence has which row: that is `Sequence.slot`. Invariant: in stream order, a row holds its sequence
as the steps launched so far leave it.
"""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence, pack_ids
from nanovllm.utils.context import Context
from nanovllm.utils.packing import to_device


class Slots:
    """State of `num_slots` sequences; one more row, the last, is the padding of captured graphs.

    last_tokens: [S + 1] int64, the token that the next decode step takes in.
    context_lens: [S + 1] int32, tokens whose K/V are in the cache, so the position of that token.
    block_tables: [S + 1, max_blocks] int32.
    temperatures: [S + 1] float32; seeds: [S + 1] int64.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.padding_row = num_slots
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def fill(
        self, seqs: list[Sequence], n: int, copies: list[tuple[int, int, int]], block_size: int
    ) -> tuple[Tensor, Context, Tensor]:
        """Send what is scheduled of `seqs` and their state, of which the first n sample.

        Returns the ids to compute, their context, and of the first n where their last token is among these ids.
        copies: (entry, block, _): this entry reads its last block from another sequence's, and stores nothing.
        """
        query_lens = [seq.num_scheduled_tokens for seq in seqs]
        key_lens = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
        ranges = [np.arange(seq.num_cached_tokens, end, dtype=np.int32) for seq, end in zip(seqs, key_lens)]
        tables = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), dtype=np.int32)
        for table, seq in zip(tables, seqs):
            table[: len(seq.block_table)] = seq.block_table
        stores = [t[p // block_size] * block_size + p % block_size for t, p in zip(tables, ranges)]
        for i, source, _ in copies:
            stores[i][:], tables[i, len(seqs[i].block_table) - 1] = -1, source
        cu_seqlens = np.array([0, *accumulate(query_lens)], dtype=np.int32)
        seeds, ids, positions, slot_mapping, rows, lens, starts, last, temperatures, block_tables = to_device(
            [
                np.array([seq.seed for seq in seqs], dtype=np.int64),
                np.concatenate([pack_ids(seq.scheduled_token_ids) for seq in seqs]).view(np.int32),
                np.concatenate(ranges),
                np.concatenate(stores),
                np.array([seq.slot for seq in seqs], dtype=np.int32),
                np.array(key_lens, dtype=np.int32),
                cu_seqlens,
                cu_seqlens[1 : n + 1] - 1,
                np.array([seq.temperature for seq in seqs], dtype=np.float32),
                tables,
            ],
            self.seeds.device,
        )
        self.block_tables[rows, : block_tables.shape[1]] = block_tables
        self.context_lens[rows], self.temperatures[rows], self.seeds[rows] = lens, temperatures, seeds
        context = Context(True, positions, slot_mapping, self.block_tables, rows, lens, starts, query_lens, key_lens)
        return ids, context, last
