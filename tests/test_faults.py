"""The engine under hostile and careless use: random input and parameters, aborts, errors, interrupts, threads, endurance.

After each of them it works, with all blocks free, or is closed and says so.
"""

import dataclasses
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_random_qwen3
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, EngineError, OutOfMemoryError, SamplingParams

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "nanovllm" / "assets" / "tiny-qwen3")
VOCAB = 1024
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAMILY = [(7 * i) % 900 + 5 for i in range(60)]  # prompts that begin alike


def engine(folder: str | Path = TINY, overlap: bool = False, **options: Any) -> LLM:
    llm = LLM(str(folder), **{"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 60, **options})
    llm.overlap = overlap
    return llm


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[dict[str, Any]]:
    return llm.generate(prompts, params, use_tqdm=False)


def assert_empty(llm: LLM) -> None:
    scheduler = llm.scheduler
    assert llm.is_finished() and not llm.sequences and not llm.in_flight and not llm.to_abort
    assert not scheduler.waiting and not scheduler.running and not scheduler.reserved_blocks
    assert sorted(scheduler.block_manager.free) == list(range(scheduler.num_blocks))
    assert not any(block.ref_count for block in scheduler.block_manager.blocks)
    assert sorted(scheduler.free_slots) == list(range(scheduler.max_num_seqs))


# Fuzzing


IDS = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([0, 1, 2, VOCAB - 1]))
TEXT = st.one_of(
    st.text(min_size=1, max_size=20),
    st.text(st.sampled_from("introduce yourself\n\0\ufffd\xff"), min_size=1, max_size=20),
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "user\n", "<think>"]), min_size=1).map("".join),
    st.binary(min_size=1, max_size=20).map(lambda b: b.decode("latin-1")),
    st.sampled_from([" ", "a" * 20_000, "\u200d\U0001f468\u200d", "e\u0301" * 9]),
)  # fmt: skip
ID_LISTS = st.one_of(
    st.lists(IDS, min_size=1, max_size=40),
    st.builds(lambda n, own: FAMILY[:n] + own, st.integers(1, 60), st.lists(IDS, max_size=3)),
)
PROMPTS = st.one_of(
    TEXT, ID_LISTS, ID_LISTS, ID_LISTS.map(tuple), st.builds(torch.tensor, ID_LISTS),
    st.builds(np.array, ID_LISTS, st.sampled_from([np.int32, np.int64, np.uint16])),
)  # fmt: skip
BAD_PROMPTS = st.sampled_from([
    "", "\ud800", "a\udfff", [5] * 100_000, [], [[]], [-1], [VOCAB], [2**31], [2**63], [10**30], [True], [1.0], [None], ["a"],
    None, 1.5, b"x", {}, {5}, np.zeros(0, np.int64), np.zeros((2, 2), np.int64), np.int64(5), np.array([0.5]),
])  # fmt: skip
EDGES = st.sampled_from([None, -1, 0, 1, 2, 10**30, 1.5, "1", "\ud800", True, float("nan"), float("inf"), [], {}, [""]])
FIELDS: dict[str, Any] = {
    "temperature": st.sampled_from([1e-4, 0.6, 1, 1e300]),
    "ignore_eos": st.booleans(),
    "stop": st.one_of(st.none(), st.sampled_from(["a", "e", " I", "\n", "\ufffd", "zzz"]), st.lists(TEXT, max_size=3)),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "top_k": st.sampled_from([-1, 0, 1, 5, VOCAB, 10**30]),
    "top_p": st.sampled_from([1e-300, 1e-9, 0.5, 1]),
    "min_p": st.sampled_from([0, 1e-300, 0.5, 1]),
    "repetition_penalty": st.sampled_from([1e-300, 1e-5, 0.5, 1, 2, 1e300]),
    "presence_penalty": st.sampled_from([-2, 0, 0.5, 2]),
    "frequency_penalty": st.sampled_from([-2, 0, 0.5, 2]),
    "logit_bias": st.dictionaries(IDS, st.sampled_from([-1e308, -1e30, -100, 0, 3.5, 1e30, 1e308]), max_size=4),
    "allowed_token_ids": st.one_of(st.none(), st.lists(IDS, min_size=1, max_size=9)),
    "bad_words": st.lists(TEXT, max_size=3),
    "seed": st.one_of(st.none(), st.sampled_from([0, -1, -(2**63), 2**64 - 1])),
    "n": st.sampled_from([1, 2, 3]),
    "logprobs": st.sampled_from([None, 0, 3, VOCAB]),
    "prompt_logprobs": st.sampled_from([None, 0, 3]),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
}
ALL_FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
OPTIONS = st.fixed_dictionaries({
    "kvcache_block_size": st.sampled_from([16, 32, 48]),
    "num_kvcache_blocks": st.sampled_from([4, 5, 6, 7, 8, 12, 24, 1, 2]),
    "max_num_seqs": st.sampled_from([3, 6, 6, 2, 1]),
    "max_num_batched_tokens": st.sampled_from([1, 5, 16, 33, 300, 16384]),
    "max_model_len": st.sampled_from([130, 4096, 4096, 64, 64, 1]),
    "enable_prefix_caching": st.booleans(),
    "async_scheduling": st.booleans(),
    "enforce_eager": st.booleans(),
    "attention_backend": st.sampled_from(["auto", "torch"]),
    "seed": st.sampled_from([0, -(2**63), 2**63 - 1]),
})  # fmt: skip


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=6))
    fields = {name: draw(FIELDS[name]) for name in names}
    if fields.get("n", 1) == 1 and draw(st.booleans()):
        fields["temperature"] = draw(st.sampled_from([0, 0.0, 1e-300, 1e-6]))
    most = draw(st.sampled_from([1, 2, 5, 12, 12, 30, 10**30, None]))
    least = draw(st.sampled_from([0, 0, 1, 2, 5]))
    fields.update(max_tokens=most, min_tokens=min(least, most or least))
    if draw(st.integers(0, 11)) == 11:
        fields[draw(st.sampled_from(ALL_FIELDS))] = draw(EDGES)
    return fields


class Injected(Exception):
    pass


FAULTS = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.just("line"), st.integers(1, 3000), st.just(KeyboardInterrupt)),
    st.tuples(
        st.sampled_from(["before launch", "after launch", "tolist"]),
        st.integers(1, 9),
        st.sampled_from([Injected, KeyboardInterrupt, SystemExit, MemoryError, torch.OutOfMemoryError]),
    ),
)
REQUESTS = st.tuples(PROMPTS, parameters())
ANY = st.tuples(st.one_of(PROMPTS, PROMPTS, BAD_PROMPTS), parameters())
CALLS = st.tuples(
    st.one_of(
        st.tuples(st.just("generate"), st.lists(ANY, min_size=1, max_size=3), st.just(0)),
        st.tuples(st.just("generate"), st.lists(REQUESTS, min_size=1, max_size=7), st.just(0)),
        st.tuples(st.just("stream"), st.lists(ANY, min_size=1, max_size=1), st.integers(0, 12)),
        st.tuples(st.just("chat"), st.lists(st.tuples(TEXT, parameters()), min_size=1, max_size=2), st.just(0)),
        st.tuples(st.just("add"), st.lists(REQUESTS, min_size=1, max_size=5), st.just(0)),
        st.tuples(st.just("add"), st.lists(ANY, min_size=1, max_size=2), st.just(0)),
        st.tuples(st.just("step"), st.just([]), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.just([]), st.integers(-2, 5)),
    ),
    FAULTS,
)


class Fault:
    """Raise `error` once, at the `count`-th line of the engine's own code or call of the runner."""

    def __init__(self, llm: LLM, where: str, count: int, error: type[BaseException]) -> None:
        self.llm, self.where, self.left, self.error = llm, where, count, error
        self.launch = llm.runner.launch

    def __enter__(self) -> "Fault":
        if self.where == "line":
            self.tracer = sys.gettrace()
            sys.settrace(self.trace)
        else:
            self.llm.runner.launch = self.launch_or_raise  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        if self.where == "line":
            sys.settrace(self.tracer)
        self.llm.runner.launch = self.launch  # type: ignore[method-assign]

    def hit(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("injected")

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        owners = ("llm.py", "llm_engine.py", "scheduler.py", "block_manager.py", "sequence.py")
        # an interrupt comes after calls, never between the few statements of `_change` that must stay together
        return self.trace_lines if code.co_filename.endswith(owners) and code.co_name != "_change" else None

    def trace_lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.hit()
        return self.trace_lines

    def launch_or_raise(self, batch: Any) -> Any:
        if self.where == "before launch":
            self.hit()
        pending = self.launch(batch)
        if self.where == "after launch":
            self.hit()
        if self.where == "tolist":
            tolist = pending.tolist
            pending.tolist = lambda: (self.hit(), tolist())[1]  # type: ignore[method-assign]
        return pending


def check(output: dict[str, Any]) -> None:
    for completion in output.get("samples", [output]):
        assert completion["finish_reason"] in ("stop", "length", "abort", None)
        assert isinstance(completion["text"], str)
        assert all(0 <= i < VOCAB for i in completion["token_ids"] + completion.get("prompt_token_ids", []))
        if "logprobs" in completion and completion["finish_reason"] in ("stop", "length"):
            assert len(completion["logprobs"]) == len(completion["token_ids"])


def perform(llm: LLM, call: tuple[str, list[Any], int], ids: list[int]) -> None:
    """One call of the public interface."""
    name, requests, count = call
    prompts = [prompt for prompt, _ in requests]
    params = []
    for _, fields in requests:
        fields = dict(fields)
        if llm.config.max_model_len > 130 and fields["max_tokens"] in (None, 10**30):
            fields["max_tokens"] = 40
        params.append(SamplingParams(**fields))
    if name == "generate":
        outputs = run(llm, prompts, params)
        assert len(outputs) == len(prompts)
        for output, p in zip(outputs, params):
            check(output)
            assert len(output["token_ids"]) <= (p.max_tokens or VOCAB)
    elif name == "chat":
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params, use_tqdm=False)
        assert len(outputs) == len(prompts)
    elif name == "stream":
        stream = llm.stream(prompts[0], params[0])
        for _, piece in zip(range(count), stream):
            assert isinstance(piece["text"], str)
        stream.close()  # type: ignore[attr-defined]
    elif name == "add":
        for prompt, p in zip(prompts, params):
            ids.append(llm.add_request(prompt, p))
    elif name == "step":
        for i in range(count):
            for output in llm.step(stream=bool(i % 2)):
                check(output)
    else:
        llm.abort(ids[count] if 0 <= count < len(ids) else count)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with engine() as llm:
        return llm.tokenizer


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with engine() as llm:
        return run(llm, FAMILY[:50])[0]["token_ids"]


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:.*preemptions")
@given(OPTIONS, st.booleans(), st.booleans(), st.lists(CALLS, min_size=3, max_size=8))
def test_after_any_calls_errors_and_interrupts_the_engine_works_and_is_empty(
    tokenizer: Any, expected: list[int], options: dict[str, Any], overlap: bool, crowded: bool, calls: list[Any]
) -> None:
    llm = engine(overlap=overlap, **options)
    if crowded:
        llm.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
    llm.tokenizer = tokenizer
    ids: list[int] = []
    for call, fault in calls:
        try:
            if fault:
                with Fault(llm, *fault):
                    perform(llm, call, ids)
            else:
                perform(llm, call, ids)
        except (ValueError, TypeError) as error:
            assert "must " in str(error)
        except (Injected, KeyboardInterrupt, SystemExit, MemoryError, torch.OutOfMemoryError) as error:
            assert fault and str(error) == "injected"
    for _ in range(3000):
        if llm.is_finished():
            break
        for output in llm.step():
            check(output)
    assert_empty(llm)
    try:
        (output,) = run(llm, FAMILY[:50])
    except ValueError as error:
        assert "must be at most" in str(error)
    else:
        assert output["token_ids"] == expected[: len(output["token_ids"])]
        assert len(output["token_ids"]) == 8 or output["finish_reason"] == "length"
    assert_empty(llm)
    llm.exit()
    with pytest.raises(EngineError, match="closed"):
        run(llm, [5])
