"""Results of a step: which are asked for, and sampled ids and log-probabilities on their way to the host.

They are copied to pinned memory behind the step, with an event, so that nothing waits for them before they are needed.
It knows which list of which sequence a row belongs to and must not change any. Invariant: rows come in the order in
which their owners are listed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence

# Of a row of log-probabilities: the sequence, which of its lists it goes to, and how many best ids were asked for.
Owner = tuple[Sequence, list[Any], int]
# Results of `Sampler.logprobs`.
Pieces = list[tuple[torch.Tensor, ...]]


class PendingIds:
    """The sampled ids of a launched step, and log-probabilities where asked for; `tolist` waits for them.

    order: the batch entry that each of `ids` belongs to.
    owners: of the rows of all `pieces`, one after another.
    """

    def __init__(self, ids: torch.Tensor, order: list[int] | slice, owners: list[Owner], pieces: Pieces) -> None:
        self.order, self.owners = order, owners
        self.ids = _to_host(ids)
        self.pieces = [[_to_host(x) for x in piece] for piece in pieces]
        self.event = torch.cuda.current_stream().record_event() if ids.is_cuda else None

    def tolist(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        in_batch = np.empty(len(self.ids), dtype=np.int64)
        in_batch[self.order] = self.ids.numpy()
        return in_batch.tolist()

    def logprobs(self) -> Iterator[tuple[Sequence, list[Any], dict[int, float]]]:
        """After `tolist`: a sequence, which of its lists, and the next entry of that, the best ids first."""
        rows = (row for piece in self.pieces for row in zip(*(x.tolist() for x in piece)))
        for (seq, entries, k), (token_id, own, ids, values) in zip(self.owners, rows):
            yield seq, entries, {**dict(zip(ids[:k], values[:k])), token_id: own}


def sampled_rows(seqs: list[Sequence]) -> tuple[list[Owner], list[int]]:
    """Those that want log-probabilities of what they sample: owner; row."""
    rows = [i for i, seq in enumerate(seqs) if seq.num_logprobs is not None]
    return [(seqs[i], seqs[i].logprobs, seqs[i].num_logprobs or 0) for i in rows], rows


def scored_rows(seqs: list[Sequence]) -> tuple[list[Owner], list[tuple[int, int]]]:
    """Positions of a prefill whose next token is one of a prompt with log-probabilities: owner; row and that token."""
    owners: list[Owner] = []
    scored: list[tuple[int, int]] = []
    row = 0
    for seq in seqs:
        start, length = seq.num_cached_tokens, seq.num_scheduled_tokens
        if seq.num_prompt_logprobs is not None and not seq.num_completion_tokens:
            following = seq.token_ids[start + 1 : start + length + 1]
            owners += [(seq, seq.prompt_logprobs, seq.num_prompt_logprobs)] * len(following)
            scored += enumerate(following, row)
        row += length
    return owners, scored


def early_stops(seqs: list[Sequence]) -> list[tuple[int, int]]:
    """(row, stop id) of the sequences that have not reached `min_tokens`."""
    early = [(i, seq) for i, seq in enumerate(seqs) if seq.num_completion_tokens + seq.num_pending < seq.min_tokens]
    return [(row, stop_id) for row, seq in early for stop_id in seq.stop_ids]


def most_asked(owners: list[Owner]) -> int:
    """Best ids to compute for each row."""
    return max((k for *_, k in owners), default=0)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete when the device has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)
