"""The token embedding and the language-model head, both split by vocabulary over the ranks.

Each id is in the share of one rank, so the sum over the ranks is its embedding. Logits stay where they are computed:
what becomes of them is the sampler's matter. Invariant: shares are equal and in the order of the ids; the last ones are
padded, and padding never gets a logit.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels.embedding import embed
from nanovllm.layers.linear import Stream
from nanovllm.utils.checkpoint import Checkpoint, new_weight
from nanovllm.utils.parallel import Parallel


class VocabParallelEmbedding(nn.Module):
    """Embedding, head or both: rank r holds the ids from r * share on; the sum over the ranks is the embedding."""

    def __init__(
        self, vocab_size: int, hidden_size: int, parallel: Parallel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.parallel = vocab_size, hidden_size, parallel
        self.share = parallel.share(vocab_size)
        self.start = parallel.rank * self.share
        self.weight = new_weight(self.share, hidden_size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Stream:
        """[N] -> the residual stream that they begin, [N, hidden]."""
        parallel, sums = self.parallel, self.parallel.sums
        x = self.weight.new_empty(len(ids), self.hidden_size)
        if sums and (part := sums.part(x, first=True)) is not None:
            x.zero_()
            embed(ids, self.weight, self.start, part)
            return Stream(x, sums.add(part, x))
        squares = embed(ids, self.weight, self.start, x)
        return Stream(x, squares) if parallel.size == 1 else Stream(parallel.all_reduce(x))

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        checkpoint.read(self.weight, f"{name}.weight", (self.vocab_size, self.hidden_size), 0, self.start)

    @property
    def num_logits(self) -> int:
        """Real ids of the share."""
        return max(0, min(self.share, self.vocab_size - self.start))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As the head: [N, hidden] -> [N, num_logits], padding cut off, in `out` where it is given."""
        return torch.mm(x, self.weight[: self.num_logits].t(), out=out)
