"""Text from token ids: piece by piece where a stop string or a stream needs it; it knows no sequences.

A token can be part of a character, and its text can depend on the one before. Invariant: `text` only grows.
"""

from typing import Any

# Earlier ids that are decoded along, because a token's text can depend on the one before it.
_OVERLAP = 5
# Last ids that may belong to a character to come: more than its bytes, because some ids have no text.
_MOST_PENDING = 16


class Detokenizer:
    """The growing text of one completion; `text` holds only what later tokens cannot change."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.token_ids: list[int] = []
        self.num_done = 0  # ids whose text is in `text`
        self.text = ""
        self.searched = 0
        self.stop_at = -1  # where the stop string that `find` gave begins

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        start, end = max(0, self.num_done - _OVERLAP), len(self.token_ids)
        known = self._decode(self.token_ids[start : self.num_done])
        whole = text = self._decode(self.token_ids[start:])
        if whole.endswith("�"):  # which may be the first bytes of a character to come
            end = max(self.num_done, end - _MOST_PENDING)
            text = self._decode(self.token_ids[start:end])
        if len(text) > len(known) and whole.startswith(text):
            self.text += text[len(known) :]
            self.num_done = end

    def catch_up(self, token_ids: list[int]) -> None:
        """Append those of all ids so far that have not been."""
        for token_id in token_ids[len(self.token_ids) :]:
            self.append(token_id)

    def find(self, stops: list[str]) -> str | None:
        """The stop string that occurs first in the text that is new since the last call, if one does."""
        starts = [max(0, self.searched - len(stop) + 1) for stop in stops]
        self.searched = len(self.text)
        found = [(at, stop) for stop, start in zip(stops, starts) if (at := self.text.find(stop, start)) >= 0]
        self.stop_at, stop = min(found, default=(-1, None))
        return stop

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
