"""Sequence: one request on its way through the engine; it knows its ids and blocks, nothing of torch.

To another rank it travels as a short tuple: the ids that a step computes, never those whose K/V are there already.

Invariant: the K/V of `token_ids[:num_cached_tokens]` are in the blocks of `block_table`, or will be once every step
that was launched has run.
"""

from array import array
from collections.abc import Iterable
from enum import Enum, auto
from itertools import count
from typing import Any

import numpy as np

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request.

    Beside the fields that `SamplingParams` sets:

    num_pending: sampled tokens of steps in flight, on the device but not yet in `token_ids`.
    slot: row of the device-side state that belongs to the sequence, -1 while it has none.
    max_num_tokens: length at which it ends, prompt included.
    stop_ids: ids that end it; `stop_strings`: texts that end it; `bad_words`: ids that must not follow each other.
    has_controls: whether it samples from other logits than the model's (`engine/controls.py`).
    block_hashes: chained hash and content of each full block so far, computed once.
    samples: all sequences of a request with n > 1, this one among them; the first stands for the request.
    logprobs, prompt_logprobs: one dict a token, id -> log-probability; filled where the parameters ask for it.
    num_sent_ids, num_sent_chars: what a stream has given out already.
    """

    block_size = 256
    _ids = count()

    __slots__ = (
        "seq_id", "status", "token_ids", "last_token", "num_tokens", "num_prompt_tokens",
        "num_cached_tokens", "num_scheduled_tokens", "is_prefill", "block_table", "temperature",
        "max_tokens", "min_tokens", "ignore_eos", "seed", "params", "num_pending", "slot",
        "max_num_tokens", "stop_ids", "stop_strings", "block_hashes", "num_registered_blocks",
        "num_hit_tokens", "finish_reason", "stop_reason", "detokenizer", "samples", "num_logprobs",
        "num_prompt_logprobs", "logprobs", "prompt_logprobs", "num_sent_ids", "num_sent_chars",
        "bad_words", "has_controls",
    )  # fmt: skip

    def __init__(self, token_ids: Iterable[int], params: SamplingParams | None = None) -> None:
        params = params or SamplingParams()
        self.seq_id = next(Sequence._ids)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.last_token = self.token_ids[-1]
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = self.num_scheduled_tokens = self.num_pending = 0
        self.is_prefill = True
        self.block_table: list[int] = []
        self.params = params
        self.temperature = params.temperature
        self.max_tokens = params.max_tokens
        self.min_tokens = params.min_tokens
        self.ignore_eos = params.ignore_eos
        self.seed = params.seed or 0
        self.slot = -1
        self.max_num_tokens = self.num_tokens + (params.max_tokens or 1 << 60)
        self.stop_ids: frozenset[int] = frozenset()
        self.stop_strings: list[str] = []
        self.block_hashes: list[tuple[int, bytes]] = []
        self.num_registered_blocks = self.num_hit_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: Any = None
        self.samples: list[Sequence] = []
        self.num_logprobs, self.num_prompt_logprobs = params.logprobs, params.prompt_logprobs
        self.logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[dict[int, float] | None] = [None]
        self.num_sent_ids = self.num_sent_chars = 0
        self.bad_words: list[list[int]] = []
        self.has_controls = False

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: Any) -> Any:
        return self.token_ids[key]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def request(self) -> "Sequence":
        """The sequence that stands for its request: the first of n samples."""
        return self.samples[0] if self.samples else self

    @property
    def has_news(self) -> bool:
        """Whether a stream of it has something to give out."""
        return self.num_completion_tokens > self.num_sent_ids

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    @property
    def looks_back(self) -> bool:
        """Whether its next token depends on its ids other than through the model."""
        return self.has_controls and (self.params.penalises or any(len(word) > 1 for word in self.bad_words))

    def block(self, i: int) -> list[int]:
        """The ids of logical block `i`; `IndexError` unless 0 <= i < num_blocks."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence of {self.num_blocks} blocks")
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    @property
    def scheduled_token_ids(self) -> list[int]:
        """The ids that this step computes, also where the state of a chunk has brought no others."""
        start, length = self.num_cached_tokens, self.num_scheduled_tokens
        return self.token_ids if len(self.token_ids) == length else self.token_ids[start : start + length]

    def __getstate__(self) -> tuple[Any, ...]:
        """What another rank needs for one step.

        While prefilling, the ids travel: all of them, or behind a cached prefix only those of this
        step, so the cost of a step never grows with tokens that are in the cache already.
        """
        last_state: list[int] | int = self.last_token
        if self.is_prefill:
            start, length = self.num_cached_tokens, self.num_scheduled_tokens
            last_state = self.token_ids[start : start + length if start and length else None]
        return (
            self.num_tokens, self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens,
            self.block_table, last_state, self.slot, self.temperature, self.seed,
        )  # fmt: skip

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        (
            self.num_tokens, self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens,
            self.block_table, last_state, self.slot, self.temperature, self.seed,
        ) = state  # fmt: skip
        self.is_prefill = isinstance(last_state, list)
        self.token_ids = last_state if self.is_prefill else []
        self.last_token = last_state[-1] if self.is_prefill and last_state else last_state


def pack_ids(ids: list[int]) -> np.ndarray:
    """[N] uint32; `OverflowError` for an id that is negative or too large. By `array`: numpy takes twice as long."""
    return np.frombuffer(array("I", ids), np.uint32)
