"""SamplingParams: how one request is sampled and when it stops; every field is checked on creation.

It must not know of models: what needs a vocabulary or a tokenizer is checked when a request is added.
"""

import math
import re
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from numbers import Integral, Real

# Dividing logits by less would overflow: such a temperature is greedy.
MIN_TEMPERATURE = 1e-5
# Half of a pair: such a string is no text that could be encoded.
SURROGATE = re.compile("[\ud800-\udfff]")


def _fail(field: str, value: object, allowed: str) -> None:
    raise ValueError(f"SamplingParams.{field}={value!r}: must be {allowed}")


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and not SURROGATE.search(value)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


@dataclass(slots=True)
class SamplingParams:
    """Parameters of one request. A wrong value raises `ValueError` with the field, value and range.

    temperature: 0 (or less than 1e-5) is greedy, otherwise logits are divided by it before sampling.
    max_tokens: most tokens to generate; `None` means up to the engine's `max_model_len`.
    min_tokens: no end token, stop id or stop string ends the request before so many tokens.
    ignore_eos: the model's end-of-sequence ids do not stop the request.
    stop: a string or strings that end the request; not part of `text` unless
        `include_stop_str_in_output`.
    stop_token_ids: ids that end the request.
    top_k: draw from the so many most probable tokens; 0 or -1: off.
    top_p: draw from the fewest most probable tokens whose share of the probability reaches it; 1: off.
    min_p: draw from tokens of at least min_p times the probability of the most probable one; 0: off.
    repetition_penalty: logits of ids in the prompt or generated so far are divided by it where positive, else
        multiplied; presence_penalty is subtracted from those of generated ids, frequency_penalty as often as they were.
    logit_bias: id -> number added to its logit.
    allowed_token_ids: no other ids are drawn.
    bad_words: strings that are not generated; each is tokenized with and without a space before it, and the last token
        is ruled out where the sequence, prompt included, ends with those before it.
    seed: of this request's noise; the same seed gives the same tokens whatever else runs.
    n: samples of one prompt; the first has the request's seed, sample i the xxh64 of it (8 bytes, little-endian)
        with seed i. Must be 1 at temperature 0.
    logprobs, prompt_logprobs: log-probabilities (of the raw logits, before temperature and all
        controls) of each generated or prompt token and of so many best ids beside it.
    detokenize: `False` leaves `text` empty.
    skip_special_tokens: special tokens do not appear in `text`.

    Order, that of vLLM: what is ruled out (allowed_token_ids, bad_words, stop ids before min_tokens) and logit_bias;
    the penalties, repetition first, so that they scale with the model's logits whatever the temperature; temperature;
    then min_p and top_k, and top_p last: it is a share of the probability that those two have left. Of equal
    probabilities the lower id comes first in top_k and top_p.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_real("temperature", 0.0, math.inf)
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1, None, "an integer >= 1, or None")
        self._check_int("min_tokens", 0, self.max_tokens, f"an integer in 0..max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "True or False")
        self._check_stop()
        self._check_int("top_k", -1, None, "an integer >= 0 (0 or -1: off)")
        self._check_real("top_p", 0.0, 1.0, exclusive_low=True)
        self._check_real("min_p", 0.0, 1.0)
        self._check_real("repetition_penalty", 0.0, math.inf, exclusive_low=True)
        self._check_real("presence_penalty", -2.0, 2.0)
        self._check_real("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._check_int("seed", -(2**63), 2**64 - 1, "an integer of 64 bits, or None")
        self._check_int("n", 1, None, "an integer >= 1")
        if self.n > 1 and self.temperature < MIN_TEMPERATURE:
            _fail("n", self.n, "an integer >= 1, and 1 at temperature 0: greedy samples would all be the same")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0, None, "an integer >= 0, or None")
        self._check_bias_and_words()

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def truncates(self) -> bool:
        """Whether improbable tokens are cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalties(self) -> tuple[float, float, float]:
        repetition = min(max(self.repetition_penalty, 1e-30), 1e30)  # what fp32 holds, and its inverse
        return repetition, self.presence_penalty, self.frequency_penalty

    @property
    def penalises(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change to other numbers than minus infinity."""
        return bool(self.logit_bias) or self.penalises

    def _check_real(self, name: str, low: float, high: float, exclusive_low: bool = False) -> None:
        value = getattr(self, name)
        allowed = f"a finite number {'>' if exclusive_low else '>='} {low:g}"
        if high != math.inf:
            allowed = f"a number in {'(' if exclusive_low else '['}{low:g}, {high:g}]"
        if not _is_finite(value):
            _fail(name, value, allowed)
        if not low <= value <= high or (exclusive_low and value == low):
            _fail(name, value, allowed)
        setattr(self, name, float(value))

    def _check_int(self, name: str, low: int, high: int | None, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool):
            _fail(name, value, allowed)
        if value < low or (high is not None and value > high):
            _fail(name, value, allowed)
        setattr(self, name, int(value))

    def _check_stop(self) -> None:
        allowed = "a string or a list of strings, none of them empty or with a lone surrogate"
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            _fail("stop", self.stop, allowed)
        if self.stop == "" or not all(map(_is_text, self.stop_strings)):
            _fail("stop", self.stop, allowed)
        self._check_ids("stop_token_ids", "a list of token ids >= 0")

    def _check_ids(self, name: str, allowed: str, least: int = 0) -> None:
        ids = getattr(self, name)
        if ids is not None:
            is_list = isinstance(ids, SequenceABC) and not isinstance(ids, str)
            if not is_list or not all(map(_is_id, ids)) or len(ids) < least:
                _fail(name, ids, allowed)
            setattr(self, name, [int(i) for i in ids])

    def _check_bias_and_words(self) -> None:
        bias, words = self.logit_bias, self.bad_words
        if bias is not None:
            if not isinstance(bias, dict) or not all(_is_id(i) and _is_finite(v) for i, v in bias.items()):
                _fail("logit_bias", bias, "a dict of token ids >= 0 to finite numbers")
            self.logit_bias = {int(i): float(v) for i, v in bias.items()}
        self._check_ids("allowed_token_ids", "a list of token ids >= 0, not empty", least=1)
        if words is not None:
            if not isinstance(words, (list, tuple)) or not all(map(_is_text, words)):
                _fail("bad_words", words, "a list of strings, none of them empty or with a lone surrogate")
            self.bad_words = list(words)
