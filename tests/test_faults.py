"""The engine under hostile and careless use: random input, aborts, errors, interrupts, threads, endurance.

After each of them it works, with all blocks free, or is closed and says so.
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, EngineError, OutOfMemoryError, SamplingParams
from nanovllm.engine import model_runner, scheduler
from nanovllm.utils import device

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
    queues = llm.scheduler
    assert llm.is_finished() and not llm.sequences and not llm.in_flight and not llm.to_abort
    assert not queues.waiting and not queues.running and not queues.reserved_blocks
    assert sorted(queues.block_manager.free) == list(range(queues.num_blocks))
    assert not any(block.ref_count for block in queues.block_manager.blocks)
    assert sorted(queues.free_slots) == list(range(queues.max_num_seqs))


# Fuzzing


IDS = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([0, 1, 2, VOCAB - 1]))
TEXT = st.one_of(
    st.text(min_size=1, max_size=20),
    st.text(st.sampled_from("introduce yourself\n\0\ufffd\xff"), min_size=1, max_size=20),
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "user\n"]), min_size=1).map("".join),
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
    "", "\ud800", "a\udfff", [5] * 100_000, [], [[]], [-1], [VOCAB], [2**31], [2**63], [10**30], [True], [1.0], [None],
    ["a"], None, 1.5, b"x", {}, {5}, np.zeros(0, np.int64), np.zeros((2, 2), np.int64), np.int64(5), np.array([0.5]),
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
        self.hit = lambda: None  # type: ignore[method-assign] # of steps that are still in flight

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


ANY_USE = OPTIONS, st.booleans(), st.booleans(), st.lists(CALLS, min_size=3, max_size=8)


def use(llm: LLM, expected: list[int], crowded: bool, calls: list[Any]) -> None:
    """Make `calls`, with their faults; then the engine must be empty, answer `expected` to `FAMILY[:50]`, and close."""
    if crowded:
        llm.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
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
    assert llm.step() == []  # does what an abort that was interrupted has left
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


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:.*preemptions")
@given(*ANY_USE)
def test_after_any_calls_errors_and_interrupts_the_engine_works_and_is_empty(
    tokenizer: Any, expected: list[int], options: dict[str, Any], overlap: bool, crowded: bool, calls: list[Any]
) -> None:
    llm = engine(overlap=overlap, **options)
    llm.tokenizer = tokenizer
    use(llm, expected, crowded, calls)


# Interrupts


def crowded(llm: LLM) -> list[dict[str, Any]]:
    """Prompts that begin alike and outgrow the pool: hits, growth, preemptions, and ends of all kinds."""
    prompts = [[*FAMILY[: 20 + i], i] for i in range(6)]
    return run(
        llm,
        prompts,
        [SamplingParams(temperature=0, max_tokens=9 + 3 * i, stop=["zzz"], ignore_eos=True) for i in range(6)],
    )


@pytest.mark.filterwarnings("ignore:.*preemptions")
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_an_interrupt_between_any_two_statements_leaks_nothing(overlap: bool, tokenizer: Any) -> None:
    with engine(overlap=overlap, num_kvcache_blocks=6, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        llm.tokenizer = tokenizer
        llm.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
        expected = crowded(llm)
        assert llm.stats()["preemptions"]
        with Fault(llm, "line", 10**9, KeyboardInterrupt) as never:
            crowded(llm)
        num_lines = 10**9 - never.left
        for line in range(1, num_lines, num_lines // 29):
            with Fault(llm, "line", line, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                crowded(llm)
            while not llm.is_finished():
                llm.step()
            assert_empty(llm)
        for output, before in zip(crowded(llm), expected):
            assert output["token_ids"] == before["token_ids"]


def test_ctrl_c_at_any_time_empties_the_engine(tokenizer: Any) -> None:
    rng = random.Random(0)
    with engine(num_kvcache_blocks=40) as llm:
        llm.tokenizer = tokenizer
        expected = run(llm, FAMILY)[0]["token_ids"]
        waiting = llm.add_request([5, 6], GREEDY)
        for _ in range(3):
            timer = threading.Timer(rng.uniform(0.01, 0.1), signal.raise_signal, [signal.SIGINT])
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    run(llm, [FAMILY[: 9 + i] for i in range(12)])
            timer.join()
            while not llm.is_finished():
                assert {output["seq_id"] for output in llm.step()} <= {waiting}
            assert_empty(llm)
        assert run(llm, FAMILY)[0]["token_ids"] == expected


def test_an_interrupt_aborts_the_requests_of_add_request_too() -> None:
    with engine() as llm:
        for prompt in ([5, 6], [7, 8]):
            llm.add_request(prompt, GREEDY)
        llm.step()
        with Fault(llm, "after launch", 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            run(llm, [[9, 10]])
        assert llm.is_finished()
        assert_empty(llm)


def test_an_interrupt_of_the_clearing_up_is_made_good_by_the_next_call() -> None:
    with engine() as llm:
        expected = run(llm, FAMILY)[0]["token_ids"]
        reset = llm.scheduler.reset

        def interrupted(seqs: Any) -> None:
            llm.scheduler.reset = reset  # type: ignore[method-assign]
            raise KeyboardInterrupt

        llm.scheduler.reset = interrupted  # type: ignore[method-assign]
        llm.add_request(FAMILY, GREEDY)
        llm.step()
        with Fault(llm, "before launch", 1, Injected), pytest.raises(KeyboardInterrupt):
            llm.step()
        assert run(llm, FAMILY)[0]["token_ids"] == expected
        assert_empty(llm)


def test_an_abort_in_the_middle_of_a_step_waits_for_its_end() -> None:
    with engine() as llm:
        ids = [llm.add_request(prompt, GREEDY) for prompt in ([5, 6], [7, 8], [9, 10])]
        llm.step()
        grow = llm.scheduler._schedule_decode

        def handler() -> Any:  # as that of a signal would
            llm.abort(ids[1])
            assert ids[1] in llm.sequences
            with pytest.raises(EngineError, match="step"):
                llm.step()
            return grow()

        llm.scheduler._schedule_decode = handler  # type: ignore[method-assign]
        llm.step()
        assert ids[1] not in llm.sequences
        llm.scheduler._schedule_decode = grow  # type: ignore[method-assign]
        found = []
        while not llm.is_finished():
            found += [output["seq_id"] for output in llm.step()]
        assert sorted(found) == [ids[0], ids[2]]
        assert_empty(llm)


# Threads


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    return results[0]


def test_an_engine_works_in_another_thread_than_its_creators() -> None:
    with engine() as llm:
        expected = run(llm, FAMILY)[0]["token_ids"]
        assert in_thread(lambda: run(llm, FAMILY))[0]["token_ids"] == expected
        assert in_thread(lambda: [piece["token_ids"] for piece in llm.stream(FAMILY, GREEDY)]) == [
            [i] for i in expected
        ]
        assert run(llm, FAMILY)[0]["token_ids"] == expected
        other = in_thread(engine)
        assert run(other, FAMILY)[0]["token_ids"] == expected
        other.exit()


def test_engines_are_built_one_at_a_time_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    load, building, most = model_runner.load_model, [], []

    def slow_load(*args: Any) -> Any:
        building.append(args)
        most.append(len(building))
        time.sleep(0.2)
        model = load(*args)
        building.pop()
        return model

    with engine() as llm, ThreadPoolExecutor(3) as pool:
        expected = run(llm, FAMILY)[0]["token_ids"]
        monkeypatch.setattr(model_runner, "load_model", slow_load)
        engines = [pool.submit(engine) for _ in range(3)]
        assert run(llm, FAMILY)[0]["token_ids"] == expected and not all(other.done() for other in engines)
        assert [run(other.result(), FAMILY)[0]["token_ids"] for other in engines] == [expected] * 3
        for other in engines:
            other.result().exit()
    assert most == [1, 1, 1]


def test_a_second_thread_gets_a_clear_error_and_the_first_its_answers() -> None:
    with engine() as llm:
        expected = run(llm, FAMILY)[0]["token_ids"]
        launch, errors = llm.runner.launch, []

        def meanwhile(batch: Any) -> Any:
            calls = [lambda: run(llm, [5]), lambda: llm.add_request([5], GREEDY), llm.step, llm.exit]
            errors.extend(map(in_thread, calls))
            return launch(batch)

        llm.runner.launch = meanwhile  # type: ignore[method-assign]
        assert run(llm, FAMILY)[0]["token_ids"] == expected
        assert len(errors) == 4 * 8
        assert all(isinstance(error, EngineError) for error in errors)
        assert_empty(llm)


def test_a_second_thread_is_kept_out_between_the_steps_of_generate_as_well() -> None:
    with engine() as llm:
        step, errors = llm._step, []
        llm._step = lambda: (errors.append(in_thread(lambda: run(llm, [5]))), step())[1]  # type: ignore[method-assign]
        assert len(run(llm, FAMILY)[0]["token_ids"]) == 8
        assert errors and all("another thread" in str(error) for error in errors)


def test_a_request_can_be_aborted_from_another_thread() -> None:
    with engine() as llm:
        step, expected = llm._step, run(llm, [5])[0]["token_ids"]
        found = iter(range(100))

        def abort_one() -> Any:
            if next(found) == 2:
                in_thread(lambda: llm.abort(max(llm.sequences)))
            return step()

        llm._step = abort_one  # type: ignore[method-assign]
        outputs = run(llm, [[5], [6]])
        assert outputs[0]["token_ids"] == expected
        assert outputs[1]["finish_reason"] == "abort" and 0 < len(outputs[1]["token_ids"]) < 8
        assert_empty(llm)


# Slow without a reason


def test_a_storm_of_preemptions_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MANY_PREEMPTIONS", 1)
    prompts = [[i] * 20 for i in range(5, 9)]
    with engine(num_kvcache_blocks=6, max_num_seqs=4) as llm:
        llm.scheduler._growth_fits = lambda *_: True  # type: ignore[method-assign]
        with pytest.warns(UserWarning, match=r"preemptions.*num_kvcache_blocks") as caught:
            for _ in range(3):
                run(llm, prompts, SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(caught) == 1 and llm.stats()["preemptions"] > 2 * (1 + 3)


def test_eager_mode_by_accident_is_warned_of() -> None:
    config = engine(num_kvcache_blocks=1).config
    with pytest.warns(UserWarning, match=r"attention_backend='torch'.*CUDA graphs"):
        config.attention_backend = "torch"
        device.warn_if_slow(config, torch.device("cuda"), fits_graphs=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.warn_if_slow(config, torch.device("cuda"), fits_graphs=True)
        config.enforce_eager = True
        device.warn_if_slow(config, torch.device("cuda"), fits_graphs=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would be used")
def test_a_gpu_that_cannot_be_used_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NVIDIA_DRIVER", os.devnull)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.warns(UserWarning, match=r"runs on the CPU.*device='cpu'") as caught:
        engine(device="auto").exit()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(device="cpu").exit()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        engine(device="auto").exit()
        monkeypatch.undo()
        run(engine(), [FAMILY[:i] for i in range(1, 20)])


def test_a_graph_that_does_not_fit_the_memory_is_replaced_by_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as llm:
        prompts = [[*FAMILY[:40], i] for i in range(4)]
        expected = run(llm, prompts)
        runner, captures = llm.runner, []

        class Graph:
            def replay(self) -> None:
                lens = [runner.slots.context_lens[row].item() + 1 for row in runner.rows[:4].tolist()]
                runner.shared_len_seen, reads, runner.reads_shared = None, runner.reads_shared, False
                runner._decode_step(4, lens)
                runner.reads_shared = reads

        def capture(size: int, reads_shared: bool = False) -> None:
            captures.append((size, reads_shared))
            raise torch.OutOfMemoryError

        monkeypatch.setattr(runner.backend, "reads_shared_prefix", lambda batch, shared: shared > 0)
        monkeypatch.setattr(runner, "_capture", capture)
        runner.graph_sizes, runner.graphs = [4], {(4, False): Graph()}
        assert [o["token_ids"] for o in run(llm, prompts)] == [o["token_ids"] for o in expected]
        assert captures == [(4, True)]


# Messages


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_no_unicode_is_refused_with_the_index_of_the_prompt(text: str) -> None:
    with engine() as llm:
        with pytest.raises(ValueError, match=r"prompt 1 holds.*surrogate"):
            run(llm, ["hello", text])
        with pytest.raises(ValueError, match=r"prompt 0 holds.*surrogate"):
            llm.stream(text)
        with pytest.raises(ValueError, match=r"prompt 0 holds.*surrogate"):
            llm.add_request(text)
        with pytest.raises(ValueError, match=r"prompt 0 holds.*surrogate"):
            llm.chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("messages", [5, {}, None, "hi", {"role": "user", "content": "hi"}, iter([])])
def test_something_that_is_no_conversation_is_a_type_error(messages: Any) -> None:
    with engine() as llm, pytest.raises(TypeError, match=r"conversation 0 is .*must be a list"):
        llm.chat(messages)


@pytest.mark.parametrize(
    "bad", [[5], ["hi"], [{}], [[]], [{"content": "hi"}], [[{"role": "user", "content": "hi"}], 5]]
)
def test_a_bad_conversation_is_named_with_its_index(bad: Any) -> None:
    with engine() as llm, pytest.raises(TypeError, match=rf"conversation {len(bad) - 1} is"):
        llm.chat(bad)


def test_ids_that_are_all_ruled_out_are_refused() -> None:
    with engine() as llm:
        with pytest.raises(ValueError, match="allowed_token_ids"):
            run(llm, [5], SamplingParams(allowed_token_ids=[7, 2], stop_token_ids=[7], min_tokens=2))
        (output,) = run(llm, [5], SamplingParams(allowed_token_ids=[7, 2, 9], stop_token_ids=[7], min_tokens=2))
        assert output["token_ids"][:2] == [9, 9]


def test_a_host_without_enough_memory_is_an_out_of_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(), torch.OutOfMemoryError()):
        monkeypatch.setattr(model_runner, "Slots", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(OutOfMemoryError, match="max_num_seqs"):
            engine()
    monkeypatch.setattr(model_runner, "Slots", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine()


def test_bench_says_that_a_model_folder_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "bench.py", "--model", "/nope"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--model /nope: must be a folder" in done.stderr and "Traceback" not in done.stderr


# Endurance


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def endure(total: int, tokenizer: Any, **options: Any) -> None:
    """`total` requests through one engine with a small pool; 200 of the answers must be those of a fresh engine."""
    rng = random.Random(0)

    def request() -> tuple[list[int], SamplingParams]:
        start = FAMILY[: rng.choice([0, 0, 16, 40, 55])] if rng.random() < 0.7 else []
        prompt = start + [rng.randrange(5, 900) for _ in range(rng.randint(1, 20))]
        return prompt, SamplingParams(
            temperature=rng.choice([0, 0.8]), seed=rng.randrange(2**60), max_tokens=rng.randint(1, 24),
            stop=rng.choice([None, None, "e", [" I", "a b"]]), stop_token_ids=rng.sample(range(VOCAB), 3),
            top_k=rng.choice([0, 0, 0, 7]), logprobs=rng.choice([None, None, 2]), n=1,
        )  # fmt: skip

    answers: dict[int, tuple[Any, Any]] = {}
    open_ids: dict[int, Any] = {}
    added = num_aborted = memory = on_device = num_done = 0
    with engine(num_kvcache_blocks=30, max_num_seqs=16, max_num_batched_tokens=256, **options) as llm:
        llm.tokenizer = tokenizer
        while added < total or not llm.is_finished():
            for _ in range(min(rng.randint(0, 12), total - added) if len(open_ids) < 40 else 0):
                prompt, params = request()
                open_ids[llm.add_request(prompt, params)] = prompt, params
                added += 1
            if open_ids and rng.random() < 0.04:
                seq_id = rng.choice(list(open_ids))
                llm.abort(seq_id)
                del open_ids[seq_id]
                num_aborted += 1
            for output in llm.step():
                made = open_ids.pop(output["seq_id"])
                num_done += 1
                if rng.random() < 200 / total:
                    answers[output["seq_id"]] = made, output
            if not memory and added > total // 5:
                # of the device with a step in flight: what an idle engine has is less
                memory, on_device = resident_bytes(), torch.cuda.memory_allocated()
        assert resident_bytes() < 1.05 * memory and torch.cuda.memory_allocated() <= on_device
        stats = llm.stats()
        assert num_done + num_aborted == total and not open_ids
        assert num_aborted > total // 100 and stats["cached_prompt_tokens"] > total
        assert not llm.streams and not llm.unclaimed
        assert_empty(llm)
    with engine(num_kvcache_blocks=400, enable_prefix_caching=False, **options) as fresh:
        fresh.tokenizer = tokenizer
        made = [request for request, _ in answers.values()]
        outputs = run(fresh, [prompt for prompt, _ in made], [params for _, params in made])
    for output, (_, before) in zip(outputs, answers.values()):
        assert output["token_ids"] == before["token_ids"]
        assert (output["text"], output["finish_reason"]) == (before["text"], before["finish_reason"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings("ignore:.*preemptions")
def test_thousands_of_requests_leak_nothing_and_are_answered_exactly(tokenizer: Any) -> None:
    endure(20_000 if settings.default.max_examples > 100 else 500, tokenizer)
