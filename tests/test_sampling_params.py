"""SamplingParams: what each field accepts, and that a wrong value is a ValueError with field, value and range."""

import math
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.utils.checks import _rules

NAN, INF = math.nan, math.inf
GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-6, 0.7, 100, np.float32(0.5), np.int64(1)],
    "max_tokens": [1, 64, 10**9, None, np.int32(3)],
    "min_tokens": [0, 1, 64, np.int64(2)],
    "ignore_eos": [True, False],
    "stop": [None, "a", ["a", "bc"], ("a",), []],
    "stop_token_ids": [None, [], [0], [5, 7], (3,), [np.int64(3)]],
    "include_stop_str_in_output": [True, False],
    "top_k": [0, -1, 1, 10**12, np.int64(50)],
    "top_p": [1, 1.0, 0.5, 1e-9, np.float32(0.5)],
    "min_p": [0, 0.0, 0.1, 1, np.float64(0.2)],
    "repetition_penalty": [1, 1.0, 1.2, 1e-9, 1e9],
    "presence_penalty": [0, 0.0, -2, 0.5, 2],
    "frequency_penalty": [0, 0.0, -2, 0.5, 2],
    "logit_bias": [None, {}, {5: 1}, {5: -1.5, 0: 1e9}, {np.int64(3): np.float32(0.5)}],
    "allowed_token_ids": [None, [0], [5, 7], (3,), [np.int64(3)]],
    "bad_words": [None, [], ["x"], ["x", "yz"], ("x",)],
    "seed": [None, 0, 1, -1, -(2**63), 2**63 - 1, 2**64 - 1, np.int64(7)],
    "n": [1, 2, np.int64(3), 16384],
    "logprobs": [None, 0, 5, np.int64(3)],
    "prompt_logprobs": [None, 0, 5],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
}
NO_NUMBER = ["1", None, [1], NAN, INF, -INF, True, 10**400]
NO_INTEGER = ["1", [1], 1.0, NAN, INF, True]
NO_BOOL = [0, 1, "yes", None, 1.0]
BAD: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBER, -0.1, -1],
    "max_tokens": [*NO_INTEGER, 0, -1],
    "min_tokens": [*NO_INTEGER, None, -1, 65],
    "ignore_eos": NO_BOOL,
    "stop": ["", [""], ["a", ""], 5, [5], [None], b"a", {"a": 1}, True],
    "stop_token_ids": [5, "5", [-1], ["5"], [1.0], [True], [None], NAN],
    "include_stop_str_in_output": NO_BOOL,
    "top_k": [*NO_INTEGER, None, -2],
    "top_p": [*NO_NUMBER, 0, -0.1, 1.1],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "repetition_penalty": [*NO_NUMBER, 0, -1],
    "presence_penalty": [*NO_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBER, -2.1, 2.1],
    "logit_bias": [5, "5", [5], [(5, 1.0)], {-1: 1.0}, {"5": 1.0}, {1.0: 1.0}, {True: 1.0}, {5: NAN}, {5: INF}],
    "allowed_token_ids": [[], (), 5, "5", [-1], ["5"], [1.0], [True], [None], NAN, {5}],
    "bad_words": ["x", [""], ["x", ""], 5, [5], [None], {"x": 1}, {"x"}],
    "seed": ["1", [1], 1.0, NAN, True, -(2**63) - 1, 2**64],
    "n": [*NO_INTEGER, None, 0, -1, 16385, 10**30],
    "logprobs": [*NO_INTEGER, -1],
    "prompt_logprobs": [*NO_INTEGER, -1],
    "detokenize": NO_BOOL,
    "skip_special_tokens": NO_BOOL,
}
# a part of the range that the message has to state
RANGES = {
    "temperature": ">= 0", "max_tokens": ">= 1", "min_tokens": "0..max_tokens", "ignore_eos": "True or False",
    "stop": "string", "stop_token_ids": "token ids", "include_stop_str_in_output": "True or False", "top_k": ">= 0",
    "top_p": "(0, 1]", "min_p": "[0, 1]", "repetition_penalty": "> 0", "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]", "logit_bias": "finite numbers", "allowed_token_ids": "not empty",
    "bad_words": "none of them empty", "seed": "64 bits", "n": ">= 1 and <= 16384",
    "logprobs": ">= 0", "prompt_logprobs": ">= 0",
    "detokenize": "True or False", "skip_special_tokens": "True or False",
}  # fmt: skip


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{str(value)[:30]}-{type(value).__name__}")
        for name, values in table.items()
        for value in values
    ]


def test_every_field_is_covered_here_with_its_documented_default() -> None:
    params = SamplingParams()
    defaults = {name: getattr(params, name) for name in SamplingParams.__slots__}
    assert set(defaults) == set(GOOD)
    assert defaults == {
        "temperature": 1.0, "max_tokens": 64, "min_tokens": 0, "ignore_eos": False, "stop": None,
        "stop_token_ids": None, "include_stop_str_in_output": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None,
        "allowed_token_ids": None, "bad_words": None, "seed": None, "n": 1, "logprobs": None, "prompt_logprobs": None,
        "detokenize": True, "skip_special_tokens": True,
    }  # fmt: skip


@pytest.mark.parametrize("options", [SamplingParams, Config])
def test_defaults_would_pass_the_checks_that_they_are_spared(options: type) -> None:
    for name, rule, is_optional, default in _rules(options):
        if default is None:
            assert is_optional, name
        else:
            assert rule.allows(default) and type(rule.convert(default)) is type(default), name


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_value_within_the_range_is_accepted_and_kept(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (list(value) if isinstance(value, tuple) and name != "stop" else value)


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_wrong_value_is_an_error_with_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert f"{name}={value!r}" in message
    assert RANGES[name] in message


def test_min_tokens_may_equal_max_tokens_but_not_exceed_it() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(ValueError, match=r"min_tokens=6.*max_tokens \(5\)"):
        SamplingParams(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_several_samples_are_refused_where_all_would_be_the_same(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"n=2: must be .* 1 at temperature 0"):
        SamplingParams(n=2, temperature=temperature)


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(SamplingParams(top_k=3))) == replace(SamplingParams(), top_k=3)


def test_a_subclass_may_add_fields_given_by_name_only() -> None:
    @dataclass(slots=True, kw_only=True)
    class Tagged(SamplingParams):
        tag: str = ""

    tagged = replace(Tagged(0.5, tag="a"), max_tokens=3)
    assert (tagged.temperature, tagged.max_tokens, tagged.tag) == (0.5, 3, "a")
    with pytest.raises(TypeError, match="did you mean 'tag'"):
        Tagged(tags="a")  # type: ignore[call-arg]


def test_stop_strings_are_a_list_whatever_was_given() -> None:
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]


def test_a_list_that_the_caller_changes_later_does_not_change_the_parameters() -> None:
    ids, bias, words = [1, 2], {1: 2.0}, ["x"]
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias, bad_words=words)
    ids.append(3)
    bias[2] = 3.0
    words.append("y")
    assert params.stop_token_ids == params.allowed_token_ids == [1, 2]
    assert (params.logit_bias, params.bad_words) == ({1: 2.0}, ["x"])


def test_numbers_become_plain_python_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int32(4), stop_token_ids=[np.int8(5)],
        logit_bias={np.int64(3): np.float32(0.5)},
    )  # fmt: skip
    assert [(type(i), type(value)) for i, value in params.logit_bias.items()] == [(int, float)]
    kinds = [type(params.temperature), type(params.max_tokens), type(params.seed), type(params.stop_token_ids[0])]
    assert kinds == [float, int, int, int]
