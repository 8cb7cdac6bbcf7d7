"""Sampler: from logits to token ids, on the device and without a sort.

Sharded sampling: the noise of a token depends on nothing but seed, position and its id, so the best of the vocabulary
is the best of the shares' best, and a rank sends one pair a row instead of its logits. It must not know of sequences,
nor of penalties and the like (`engine/controls.py`). Invariant: ids are the same on every rank.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.sampling import sample, sample_with_scores, sample_with_scores_triton
from nanovllm.utils.packing import to_device
from nanovllm.utils.parallel import Parallel

# Rows of logits that are held in fp32 at a time for log-probabilities.
LOGPROB_ROWS = 64


class Sampler:
    """Samples from logits that are split over the ranks by vocabulary.

    Gumbel-max: the best of logit / temperature plus noise keyed by (seed, position, token id) is a
    sample of the softmax, and a maximum needs no exchange of logits: each rank finds its own, and
    only (value, id) pairs travel. `vocab_start` is the first id of this rank's share.
    """

    def __init__(self, parallel: Parallel, vocab_start: int) -> None:
        self.parallel, self.vocab_start = parallel, vocab_start

    def __call__(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor,
        last_tokens: Tensor, out: Tensor,
    ) -> Tensor:  # fmt: skip
        """[B, share of the vocabulary] -> ids [B] int64 in `out`, the same on every rank; temperature 0 is greedy.

        rows [B]: where each has its temperature and seed, and its place in `last_tokens`, which is written too.
        """
        sums = self.parallel.sums
        if self.parallel.size == 1:
            return sample(logits, temperatures, seeds, positions, rows, last_tokens, out)
        if sums and 2 * len(rows) <= len(sums.best.turns):
            args = (logits, temperatures, seeds, positions, rows, last_tokens, out, self.vocab_start)
            return sample_with_scores_triton(*args, peers=sums.best)[1]
        scores, ids = sample_with_scores(logits, temperatures, seeds, positions, rows, vocab_offset=self.vocab_start)
        every = self.parallel.all_gather(torch.stack([scores.double(), ids.double()]))
        best = every[:, 0].argmax(0, keepdim=True)  # the first of equals: the lowest id
        last_tokens[rows] = out.copy_(every[:, 1].gather(0, best)[0])
        return out

    def rule_out(self, logits: Tensor, pairs: list[tuple[int, int]]) -> None:
        """Set logits of (row, token id) to -inf, as far as the ids are in this rank's share of the vocabulary."""
        start = self.vocab_start
        mine = [(row, token_id - start) for row, token_id in pairs if 0 <= token_id - start < logits.shape[1]]
        if mine:
            row, column = to_device([np.array(mine, dtype=np.int32).T], logits.device)[0]
            logits[row, column] = -torch.inf

    def logprobs(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, ...]:
        """Log-probabilities in fp32, the same on every rank.

        [R, share of the vocabulary], ids [R] -> `ids`, theirs [R], the ids of the best k [R, k] int64, theirs [R, k].
        """
        parts = [self._share_of_logprobs(*rows, k) for rows in zip(logits.split(LOGPROB_ROWS), ids.split(LOGPROB_ROWS))]
        table = torch.cat(parts)  # [R, 2 + 2k] fp32, which holds ids below 2^24 exactly
        if self.parallel.size > 1:
            every = self.parallel.all_gather(table)
            values, where = every[..., 2 : 2 + k].transpose(0, 1).flatten(1).topk(k)
            best = every[..., 2 + k :].transpose(0, 1).flatten(1).gather(1, where)
            table = torch.cat([every[..., :1].logsumexp(0), every[..., 1:2].amax(0), values, best], 1)
        total, own, values, best = table.split([1, 1, k, k], 1)
        return ids, (own - total)[:, 0], best.long(), values - total

    def _share_of_logprobs(self, logits: Tensor, ids: Tensor, k: int) -> Tensor:
        """Of this rank's share: [logsumexp, logit of `ids` or -inf, best k logits, their ids] for each row."""
        logits, vocab = logits.float(), logits.shape[1]
        values, best = (
            F.pad(x, (0, k - x.shape[1]), value=v) for x, v in zip(logits.topk(min(k, vocab)), (-torch.inf, 0))
        )
        column = (ids - self.vocab_start)[:, None]
        own = logits.gather(1, column.clamp(0, vocab - 1)).where((column >= 0) & (column < vocab), -torch.inf)
        return torch.cat([logits.logsumexp(1, keepdim=True), own, values, best + self.vocab_start], 1)
