"""Sampler: from logits to token ids, on the device and without a sort."""

import torch

from nanovllm.kernels.sampling import sample, sample_with_scores
from nanovllm.utils.parallel import Parallel


class Sampler:
    """Samples from logits that are split over the ranks by vocabulary.

    Gumbel-max: the best of logit / temperature plus noise keyed by (seed, position, token id) is a
    sample of the softmax, and a maximum needs no exchange of logits: each rank finds its own, and
    only (value, id) pairs travel. `vocab_start` is the first id of this rank's share.
    """

    def __init__(self, parallel: Parallel, vocab_start: int) -> None:
        self.parallel, self.vocab_start = parallel, vocab_start

    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[B, share of the vocabulary] -> ids [B] int64, the same on every rank; temperature 0 is greedy."""
        if self.parallel.size == 1:
            return sample(logits, temperatures, seeds, positions)
        scores, ids = sample_with_scores(logits, temperatures, seeds, positions, self.vocab_start)
        every = self.parallel.all_gather(torch.stack([scores.double(), ids.double()]))
        best = every[:, 0].argmax(0, keepdim=True)  # the first of equals: the lowest id
        return every[:, 1].gather(0, best)[0].long()
