"""SamplingParams: how one request is sampled and when it stops; every field is checked on creation.

It must not know of models: what needs a vocabulary or a tokenizer is checked when a request is added.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from nanovllm.utils.checks import Rule, check, fail, integer, is_finite, is_integer, is_list, real, reject_unknown

# Dividing logits by less would overflow: such a temperature is greedy.
MIN_TEMPERATURE = 1e-5
MAX_SAMPLES = 1 << 14  # of one prompt: each is a sequence on the host before any runs
# Half of a pair: such a string is no text that could be encoded.
SURROGATE = re.compile("[\ud800-\udfff]")


def _is_id(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and not SURROGATE.search(value)


def _is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(_is_id(i) and is_finite(v) for i, v in value.items())


def ids_from_text(bias: dict[Any, Any]) -> dict[Any, Any]:
    """A `logit_bias` whose ids came as text, as in JSON; other keys stay, for the check to refuse."""
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in bias.items()}


_PENALTY = real("a number in [-2, 2]", lambda p: -2 <= p <= 2)
_WORDS = Rule("a list of strings, none of them empty or with a lone surrogate", lambda v: is_list(v, _is_text), list)
_STOP = Rule(f"a string or {_WORDS.words}", lambda v: _is_text(v) or _WORDS.allows(v))
_IDS = Rule("a list of token ids >= 0", lambda v: is_list(v, _is_id), lambda v: list(map(int, v)))
_SOME_IDS = Rule(f"{_IDS.words}, not empty", lambda v: _IDS.allows(v) and len(v) > 0, _IDS.convert)
_BIAS = Rule("a dict of token ids >= 0 to finite numbers", _is_bias, lambda v: {int(i): float(x) for i, x in v.items()})


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
    n: samples of one prompt, 1 to 16384; the first has the request's seed, sample i the xxh64 of it (8 bytes,
        little-endian) with seed i. Must be 1 at temperature 0.
    logprobs, prompt_logprobs: log-probabilities (of the raw logits, before temperature and all
        controls) of each generated or prompt token and of so many best ids beside it.
    detokenize: `False` leaves `text` empty.
    skip_special_tokens: special tokens do not appear in `text`.

    Order, that of vLLM: what is ruled out (allowed_token_ids, bad_words, stop ids before min_tokens) and logit_bias;
    the penalties, repetition first, so that they scale with the model's logits whatever the temperature; temperature;
    then min_p and top_k, and top_p last: it is a share of the probability that those two have left. Of equal
    probabilities the lower id comes first in top_k and top_p. If rules leave no id, which one is drawn is undefined.
    """

    temperature: Annotated[float, real("a finite number >= 0", lambda t: t >= 0)] = 1.0
    max_tokens: Annotated[int | None, integer(1)] = 64
    min_tokens: Annotated[int, integer(0, words="an integer in 0..max_tokens")] = 0
    ignore_eos: bool = False
    stop: Annotated[str | list[str] | None, _STOP] = None
    stop_token_ids: Annotated[list[int] | None, _IDS] = None
    include_stop_str_in_output: bool = False
    top_k: Annotated[int, integer(-1, words="an integer >= 0 (0 or -1: off)")] = 0
    top_p: Annotated[float, real("a number in (0, 1]", lambda p: 0 < p <= 1)] = 1.0
    min_p: Annotated[float, real("a number in [0, 1]", lambda p: 0 <= p <= 1)] = 0.0
    repetition_penalty: Annotated[float, real("a finite number > 0", lambda p: p > 0)] = 1.0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    logit_bias: Annotated[dict[int, float] | None, _BIAS] = None
    allowed_token_ids: Annotated[list[int] | None, _SOME_IDS] = None
    bad_words: Annotated[list[str] | None, _WORDS] = None
    seed: Annotated[int | None, integer(-(2**63), 2**64 - 1, "an integer of 64 bits")] = None
    n: Annotated[int, integer(1, MAX_SAMPLES)] = 1
    logprobs: Annotated[int | None, integer(0)] = None
    prompt_logprobs: Annotated[int | None, integer(0)] = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __new__(cls, *args: object, **given: object) -> "SamplingParams":
        reject_unknown("SamplingParams", given, cls.__dataclass_fields__)
        return object.__new__(cls)  # `super()` knows the class from before its slots

    def __post_init__(self) -> None:
        check(self, "SamplingParams.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            fail("SamplingParams.min_tokens", self.min_tokens, f"an integer in 0..max_tokens ({self.max_tokens})")
        if self.n > 1 and self.temperature < MIN_TEMPERATURE:
            words = "an integer >= 1, and 1 at temperature 0: greedy samples would all be the same"
            fail("SamplingParams.n", self.n, words)

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
