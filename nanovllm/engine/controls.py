"""Controls: sampling again, from changed logits, for the sequences of a step whose parameters ask for it.

A step samples every row plainly, inside its graph; requests without controls pay for nothing else. Here the rows with
controls are copied, changed and sampled. Everything is ordered by the stream: nothing waits for the device, and what
depends on ids that the host does not know yet reads them from `history`. It must not know how a step computes its
logits. Invariant: rows without controls keep the ids that they have, and every rank gets the same ones.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import Slots
from nanovllm.kernels.sampling import sample
from nanovllm.kernels.truncation import SCRATCH_ROW, truncate
from nanovllm.utils.packing import to_device
from nanovllm.utils.parallel import Parallel

MAX_ROWS = 128  # changed at once: bounds the memory, and so many rows of bf16 stay in a GPU's cache


# The flags and host arrays of each group of rows, and of a prefill (slot, ids) of the sequences that look back.
Plan = tuple[list[tuple[tuple[bool, ...], list[np.ndarray]]], list[tuple[int, list[int]]]]


def plan_controls(seqs: list[Sequence], prefill: bool) -> Plan:
    """What `Controls` of any rank need to know of a batch."""
    groups, controlled = [], [i for i, s in enumerate(seqs) if s.has_controls]
    for adjusts in (False, True):
        rows = [i for i in controlled if seqs[i].params.adjusts_logits == adjusts]
        groups += [_plan_rows(rows[i : i + MAX_ROWS], seqs) for i in range(0, len(rows), MAX_ROWS)]
    return groups, [(s.slot, s.token_ids) for s in seqs if s.looks_back] if prefill else []


def _plan_rows(index: list[int], seqs: list[Sequence]) -> tuple[tuple[bool, ...], list[np.ndarray]]:
    mine = [seqs[i] for i in index]
    params = [s.params for s in mine]
    allowed = [(r, i) for r, p in enumerate(params) for i in p.allowed_token_ids or ()]
    words = [(r, word) for r, s in enumerate(mine) for word in s.bad_words if len(word) > 1]
    added = [(r, i, np.clip(v, -1e30, 1e30)) for r, p in enumerate(params) for i, v in (p.logit_bias or {}).items()]
    added += [(r, word[0], -np.inf) for r, s in enumerate(mine) for word in s.bad_words if len(word) == 1]
    added += [(r, word[-1], -np.inf) for r, word in words]
    longest = max((len(word) for _, word in words), default=1)
    prefixes = np.reshape([[-1] * (longest - len(word)) + word[:-1] for _, word in words], (len(words), longest - 1))
    ints = [
        index, [s.slot for s in mine], [s.num_prompt_tokens for s in mine], [min(p.top_k, 2**31 - 1) for p in params],
        sorted({r for r, _ in allowed}), np.reshape(allowed, (-1, 2)).T,
        np.reshape([e[:2] for e in added], (-1, 2)).T, prefixes,
    ]  # fmt: skip
    floats = [[v for *_, v in added], *zip(*((p.top_p, p.min_p, *p.penalties) for p in params))]
    flags = (
        params[0].adjusts_logits, any(p.penalises for p in params), any(s.looks_back for s in mine),
        any(p.truncates for p in params),
    )  # fmt: skip
    return flags, [np.asarray(a, np.int32) for a in ints] + [np.asarray(a, np.float32) for a in floats]


class Controls:
    """One rank's part; every rank gathers whole rows and gets the same ids.

    history: [slots + 1, max_model_len] int32, the ids of the sequences that look back, by position: all at the end of
        a prefill, then every sampled one. It is empty until the first such sequence comes.
    """

    def __init__(self, slots: Slots, parallel: Parallel, vocab_size: int, max_model_len: int) -> None:
        self.slots, self.parallel, self.vocab_size, self.max_model_len = slots, parallel, vocab_size, max_model_len
        self.history = torch.empty(0, dtype=torch.int32, device=slots.seeds.device)
        self.groups: list[_Rows] = []

    @property
    def num_bytes(self) -> int:
        """Most device memory that controls can take."""
        num_slots, length = len(self.slots.seeds), self.max_model_len
        # rows, their copies in fp32, then counts or what truncation collects; and what is computed for each position
        vocab = 8 * self.vocab_size + 4 * max(self.vocab_size, SCRATCH_ROW)
        return 4 * num_slots * length + min(MAX_ROWS, num_slots) * (vocab + 56 * length)

    def rehearse(self, dtype: torch.dtype) -> None:
        """Call the kernels of rows with controls, as for logits of `dtype` and for adjusted ones."""
        slots = self.slots
        one = torch.ones(2, device=slots.seeds.device)
        lens = rows = one.int()
        width = self.parallel.share(self.vocab_size) * self.parallel.size
        logits = one.new_zeros(2, width, dtype=dtype)[:, : self.vocab_size]
        for x in (logits, logits.float()):
            truncate(x, one, lens, one, one)
            sample(x, slots.temperatures, slots.seeds, lens, rows, slots.last_tokens)

    def load(self, plan: Plan) -> None:
        """Upload what the next calls of `resample` need."""
        groups, histories = plan
        self.groups = [_Rows(*group, self.history.device) for group in groups]
        for slot, token_ids in histories:
            if not len(self.history):
                self.history = self.history.new_zeros(len(self.slots.seeds), self.max_model_len)
            (ids,) = to_device([np.array(token_ids, dtype=np.int32)], self.history.device)
            self.history[slot, : len(ids)] = ids

    def resample(self, logits: Tensor, ids: Tensor, key_lens: list[int]) -> None:
        """Replace in `ids` [B], and in the slots, what the batch of the plan samples from `logits` [B, V].

        key_lens: tokens of each of its sequences; needed if any has controls.
        """
        slots, vocab = self.slots, self.vocab_size
        for rows in self.groups:
            x = logits[rows.index]
            if self.parallel.size > 1:
                x = self.parallel.all_gather(F.pad(x, (0, self.parallel.share(vocab) - x.shape[1])))
                x = x.transpose(0, 1).flatten(1)[:, :vocab]
            lens = slots.context_lens[rows.slots]
            history = self.history[rows.slots, : max(key_lens)] if rows.looks_back else self.history
            x = rows.change(x, history, lens, slots.temperatures[rows.slots])
            new = sample(x, slots.temperatures, slots.seeds, lens, rows.slots, slots.last_tokens)
            ids[rows.index] = new
            if rows.looks_back:
                self.history[rows.slots, lens] = new.int()


class _Rows:
    """At most MAX_ROWS rows of a batch, R of them, with their controls on the device.

    index, slots: [R] batch entries and slots. allowed: [2, A] (row, id) of the ids that rows with such a list keep.
    added: [2, E] (row, id) with values [E] to add; the last W of them are the last ids of words, which apply if the
    ids before are words [W, L], right-aligned and padded with -1.
    """

    def __init__(self, flags: tuple[bool, ...], arrays: list[np.ndarray], device: torch.device) -> None:
        self.adjusts, self.penalises, self.looks_back, self.truncates = flags
        (
            self.index, self.slots, self.num_prompt, self.top_k, self.restricted, self.allowed, self.added, self.words,
            self.values, self.top_p, self.min_p, *penalties,
        ) = to_device(arrays, device)  # fmt: skip
        self.penalties = tuple(penalties)

    def change(self, logits: Tensor, history: Tensor, lens: Tensor, temperatures: Tensor) -> Tensor:
        """logits [R, V] with all the controls of these rows; history [R, >= lens.max()], lens [R]: ids so far."""
        if self.adjusts:
            logits = logits.float()
        if len(self.restricted):
            row, column = self.allowed
            kept = logits[row, column]
            logits[self.restricted] = -torch.inf
            logits[row, column] = kept
        if len(self.values):
            values = self.values
            if n := len(self.words):
                values = values.clone()
                values[-n:].masked_fill_(~ends_with(history, lens, self.added[0, -n:], self.words), 0.0)
            logits.index_put_(tuple(self.added), values.to(logits.dtype), accumulate=True)
        if self.penalises:
            penalise(logits, history, lens, self.num_prompt, *self.penalties)
        if self.truncates:
            truncate(logits, temperatures, self.top_k, self.top_p, self.min_p)
        return logits


def ends_with(history: Tensor, lens: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """[W] bool: whether row r = rows[w] of history [R, L], cut after lens[r], ends with words[w] ([W, N], -1: any)."""
    position = lens[rows, None] + torch.arange(-words.shape[1], 0, device=words.device)
    ids = history[rows[:, None], position.clamp(min=0)]
    return ((words < 0) | ((ids == words) & (position >= 0))).all(1)


def penalise(
    logits: Tensor, history: Tensor, lens: Tensor, num_prompt: Tensor, repetition: Tensor, presence: Tensor,
    frequency: Tensor,
) -> None:  # fmt: skip
    """Apply the penalties [R] to logits [R, V] in place; history [R, L] int32 ids of which the first lens [R] count.

    Every id so far: positive logits are divided by `repetition`, others multiplied. Those from num_prompt [R] on:
    - frequency * how often - presence.
    """
    position = torch.arange(history.shape[1], device=history.device)
    valid = position < lens[:, None]
    generated = valid & (position >= num_prompt[:, None])
    ids = history.where(valid, history[:, :1]).long()  # the first is one of them: equal ids write equal logits
    counts = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, ids, generated.int()).gather(1, ids)
    x = logits.gather(1, ids)
    x = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = x - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    logits.scatter_(1, ids, x)
