"""Slots: the state of the running sequences that lives on the device, one row a sequence.

A decode step derives all of its inputs from here, so the host sends only what changed: who takes part, and new blocks.
Sampled ids are written back here and never wait for the host. It must not know which sequence has which row: that is
`Sequence.slot`. Invariant: in stream order, a row holds its sequence as the steps launched so far leave it.
"""

import torch


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
