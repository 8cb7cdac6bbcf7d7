"""Tensor parallelism on a CPU: the tokens of one rank, small messages, and nothing left behind however it ends."""

import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_faults
import torch
from checkpoints import save_random_qwen3
from test_qwen3 import Oracle, ask_transformers

from nanovllm import LLM, CheckpointError, EngineError, OutOfMemoryError, SamplingParams
from nanovllm.engine import worker
from nanovllm.utils import parallel

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text(encoding="utf-8"))["answers"][::8]
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
# nothing divides by 4 but the attention heads
ODD_SHAPE = {
    "vocab_size": 1023, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 157,
    "hidden_size": 64, "num_hidden_layers": 2, "attention_bias": True,
}  # fmt: skip


def engine(folder: str, size: int, **options: Any) -> LLM:
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 32}
    return LLM(folder, device="cpu", tensor_parallel_size=size, **{**settings, **options})


def greedy(max_tokens: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def ids_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = save_random_qwen3(tmp_path_factory.mktemp("odd"), **ODD_SHAPE)
    return ask_transformers(folder, [(length, 4, 20) for length in (1, 15, 16, 17, 40, 100)])


@pytest.fixture(scope="module")
def odd_on_4(odd: Oracle) -> Iterator[LLM]:
    with engine(odd.folder, 4) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny_on(tiny_model: str) -> Iterator[dict[int, LLM]]:
    """Engines of 2 and 4 ranks, alive at the same time (and with `odd_on_4`)."""
    with engine(tiny_model, 2, num_kvcache_blocks=14) as two, engine(tiny_model, 4) as four:
        yield {2: two, 4: four}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    fields = {"hidden_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 1}
    return save_random_qwen3(tmp_path_factory.mktemp("small"), **fields)


def no_watermark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.scheduler, "_growth_fits", lambda *_: True)


# Right


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (2, True), (4, True)])
def test_golden_answers_are_exact_with_chunks_prefix_hits_and_preemption(
    tiny_on: dict[int, LLM], monkeypatch: pytest.MonkeyPatch, size: int, overlap: bool
) -> None:
    llm = tiny_on[size]
    monkeypatch.setattr(llm, "overlap", overlap)
    no_watermark(llm, monkeypatch)
    before = llm.stats()
    answers = GOLDEN[::2] if size == 2 else sorted(GOLDEN, key=lambda answer: len(answer["token_ids"]))[:6]
    for part in (answers, answers[-1:], answers[-1:]):
        prompts = [answer["prompt_token_ids"] for answer in part]
        assert ids_of(llm, prompts, SamplingParams(temperature=0, max_tokens=300)) == [a["token_ids"] for a in part]
    after = llm.stats()
    assert after["cached_prompt_tokens"] > before["cached_prompt_tokens"]
    assert after["preemptions"] > before["preemptions"] or size == 4


@BOTH
def test_2_kv_heads_and_1023_ids_on_4_ranks_give_the_tokens_of_transformers(
    odd: Oracle, odd_on_4: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    monkeypatch.setattr(odd_on_4, "overlap", overlap)
    no_watermark(odd_on_4, monkeypatch)
    before = odd_on_4.stats()["preemptions"]
    for prompts, expected in ((odd.prompts, odd.tokens), (odd.prompts[:1], odd.tokens[:1])):
        assert ids_of(odd_on_4, prompts, greedy()) == expected
    assert odd_on_4.stats()["preemptions"] > before
    assert {token_id * 4 // 1024 for tokens in odd.tokens for token_id in tokens} == {0, 1, 2, 3}


@BOTH
def test_seeded_sampling_and_min_tokens_equal_one_rank(
    odd: Oracle, odd_on_4: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompts = odd.prompts[::2]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=24, min_tokens=i, stop_token_ids=list(range(i, 1023, 9)))
        for i in range(len(prompts))
    ]
    monkeypatch.setattr(odd_on_4, "overlap", overlap)
    no_watermark(odd_on_4, monkeypatch)
    with engine(odd.folder, 1, num_kvcache_blocks=500) as one:
        expected = ids_of(one, prompts, params)
        assert ids_of(odd_on_4, prompts, params) == expected
        assert len({len(tokens) for tokens in expected}) > 5


@BOTH
def test_controls_samples_and_log_probabilities_equal_one_rank(
    odd: Oracle, odd_on_4: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompts = odd.prompts[::2]
    fields: list[dict[str, Any]] = [
        {"top_k": 5}, {"top_p": 0.8, "n": 3}, {"min_p": 0.02, "logprobs": 3},
        {"repetition_penalty": 1.4, "logprobs": 0},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5}, {"logit_bias": {1000: 6.0}, "prompt_logprobs": 4}, {},
        {"allowed_token_ids": [3, 400, 900, 1022]}, {"logprobs": 5, "prompt_logprobs": 0, "min_tokens": 9, "n": 2},
    ]  # fmt: skip
    params = [
        SamplingParams(seed=i, max_tokens=14, ignore_eos=True, **fields[i % len(fields)]) for i in range(len(prompts))
    ]
    monkeypatch.setattr(odd_on_4, "overlap", overlap)
    no_watermark(odd_on_4, monkeypatch)
    with engine(odd.folder, 1, num_kvcache_blocks=500) as one:
        for expected, found in zip(*(llm.generate(prompts, params, use_tqdm=False) for llm in (one, odd_on_4))):
            for a, b in zip(expected.get("samples", [expected]), found.get("samples", [found])):
                assert a["token_ids"] == b["token_ids"]
                for key in ("logprobs", "prompt_logprobs"):
                    for x, y in zip(a.get(key) or [], b.get(key) or [], strict=True):
                        assert x == pytest.approx(y, abs=1e-4) if x else x == y


def test_engines_alive_at_once_run_step_by_step_in_turn(tiny_on: dict[int, LLM], odd: Oracle, odd_on_4: LLM) -> None:
    answer = GOLDEN[0]
    expected = [answer["token_ids"][:20], answer["token_ids"][:20], odd.tokens[-1]]
    engines = [*tiny_on.values(), odd_on_4]
    for llm in engines[:2]:
        llm.add_request(answer["prompt_token_ids"], greedy())
    odd_on_4.add_request(odd.prompts[-1], greedy())
    found: list[list[int]] = [[], [], []]
    while not all(llm.is_finished() for llm in engines):
        for i, llm in enumerate(engines):
            for output in llm.step():
                found[i] = output["token_ids"]
    assert found == expected


def test_each_rank_has_its_slice_of_heads_intermediate_size_and_vocabulary(odd_on_4: LLM) -> None:
    model = odd_on_4.runner.model
    assert tuple(model.embed_tokens.weight.shape) == (256, 64)
    layer = model.layers[0]
    assert layer.self_attn.qkv_proj.weight.shape[0] == 3 * 32
    assert layer.mlp.down_proj.weight.shape[1] == 40
    assert layer.self_attn.attn.k_cache.shape[2] == 1


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(4, 6, 3), (8, 4, 2), (6, 12, 4), (2, 7, 7), (5, 4, 4)])
def test_heads_that_cannot_be_split_are_refused_before_any_process_starts(
    tmp_path: Path, size: int, heads: int, kv_heads: int
) -> None:
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 1}
    folder = save_random_qwen3(tmp_path, **fields)
    running = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}.*{heads} attention.*{kv_heads} KV"):
        engine(folder, size)
    assert set(multiprocessing.active_children()) == running


def test_a_daemonic_process_is_told_that_it_may_not_start_ranks(
    small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1 in a daemonic process"):
        engine(small_model, 2)


def test_more_ranks_than_a_tiny_vocabulary_has_shares_for_are_refused(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    folder = save_random_qwen3(tmp_path, **fields)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4.*9 token ids"):
        engine(folder, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_sums_through_memory_that_all_ranks_see_give_the_same_tokens(
    odd: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "serve", rank_faults.serve_with_peer_sums)
    monkeypatch.setattr(worker.Parallel, "connect", rank_faults.connect_with_peer_sums)
    calls: list[tuple[int, int]] = []
    inner = parallel.PeerSums.add

    def add(sums: parallel.PeerSums, part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        calls.append((len(x), sums.region))
        return inner(sums, part, x)

    def give_up(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(parallel.PeerSums, "add", add)
    signal.signal(signal.SIGALRM, give_up)  # a wait for a flag never ends by itself
    signal.alarm(100)
    with engine(odd.folder, 4, max_num_batched_tokens=20, num_kvcache_blocks=6) as llm:
        num_layers = len(llm.runner.model.layers)
        llm.runner.parallel.sums.region = 1  # as if a pass had failed in the middle, on one rank
        assert ids_of(llm, odd.prompts[1:16:4], greedy(8)) == [tokens[:8] for tokens in odd.tokens[1:16:4]]
    signal.alarm(0)
    assert {1, 20} <= {rows for rows, _ in calls}  # decode, and chunks of prompts
    regions = [region for _, region in calls]
    assert regions == [0, *([1, 2] * num_layers)] * regions.count(0)


# Messages


class Wire:
    """In place of a pipe: the sizes of the messages, by method."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {"prefill": [], "decode": []}

    def send_bytes(self, message: bytes) -> None:
        self.sizes[pickle.loads(message)[0]].append(len(message))


def message_sizes(folder: str, prompts: list[list[int]], max_tokens: int, **options: Any) -> dict[str, list[int]]:
    """Of an engine whose ranks compute nothing: every token is 5."""
    wire = Wire()
    ranks = worker.Ranks.__new__(worker.Ranks)
    ranks.pipes = [wire]  # type: ignore[list-item]
    with LLM(folder, device="cpu", max_model_len=32768, **options) as llm:
        runner: Any = llm.runner
        runner.graph_sizes = [512]  # as on a GPU: no lengths on the host

        def run(name: str, n: int, *args: Any) -> tuple[torch.Tensor, list[Any]]:
            ranks.send(name, (n, *args))
            return torch.full((n if name == "decode" else args[0],), 5), []

        runner.prefill, runner.decode = partial(run, "prefill"), partial(run, "decode")
        for part in (prompts[:1], prompts):  # the first fills the cache
            ids_of(llm, part, greedy(max_tokens))
    return wire.sizes


def test_messages_do_not_grow_with_the_tokens_in_the_cache(tmp_path: Path) -> None:
    fields = {"max_position_embeddings": 32768, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    folder = save_random_qwen3(tmp_path, **fields)
    sizes = {}
    for prefix in (300, 30_000):
        prompts = [[3] * (prefix // 256 * 256) + [i % 32] * 40 for i in range(200)]
        sizes[prefix] = message_sizes(folder, prompts, 300, num_kvcache_blocks=1000)
    print({prefix: {name: max(found) for name, found in size.items()} for prefix, size in sizes.items()})
    for short, long in zip(sizes[300]["decode"], sizes[30_000]["decode"]):
        assert long <= 1.1 * short < 2500  # numbers of blocks above 255 take a byte more
    assert sorted(sizes[30_000]["decode"])[500] < 40  # of 600 steps all but the few that bring blocks
    ids, tables = 40 * 200, 200 * 30_000 // 256
    assert max(sizes[30_000]["prefill"]) < 3 * max(30_000, ids + tables) + 200 * 60


# Life and death


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Afterwards there is no process, socket, pipe, thread or temporary file that was not there before."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()  # starts Python's own resource tracker, which stays
    process.join()
    process.close()
    running, files, threads = set(multiprocessing.active_children()), num_open_files(), threading.active_count()
    yield
    assert set(multiprocessing.active_children()) == running
    for _ in range(50):
        gc.collect()  # the traceback of an error holds what its frames wait for
        if (num_open_files(), threading.active_count()) == (files, threads):
            break
        time.sleep(0.1)
    assert (num_open_files(), threading.active_count()) == (files, threads)
    assert list(tmp_path.iterdir()) == []


def faulty(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Let ranks above 0 have this runner, or this whole life."""
    monkeypatch.setattr(worker, "serve", partial(rank_faults.serve_with, fault) if isinstance(fault, type) else fault)


@pytest.mark.parametrize(
    ("fault", "error", "part"),
    [
        (rank_faults.FailsWhenBuilt, EngineError, r"(?s)rank . failed.*rank_faults.py.*no such rank"),
        (rank_faults.HasNoMemory, OutOfMemoryError, r"7 MiB are missing"),
        (rank_faults.IsKilledWhenBuilt, EngineError, r"rank . was ended by signal 9"),
        (rank_faults.is_killed_at_once, EngineError, r"rank . was ended by signal 9"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_in_the_constructor_of_a_rank_reaches_the_caller(
    small_model: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None, fault: Any, error: type, part: str
) -> None:
    faulty(monkeypatch, fault)
    start = time.monotonic()
    with pytest.raises(error, match=part):
        engine(small_model, 2)
    assert time.monotonic() - start < 15


def test_a_rank_that_is_killed_while_the_ranks_connect_is_an_error(
    small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, rank_faults.is_killed_while_connecting)
    start = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 was ended by signal 9"):
        engine(small_model, 2)
    assert time.monotonic() - start < 15


def test_an_error_of_rank_0_stays_what_it_is(small_model: str, tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "model").mkdir()
    for file in Path(small_model).iterdir():
        if file.suffix == ".json":
            (tmp_path / "model" / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=r"no .*safetensors"):
        engine(str(tmp_path / "model"), 2)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model").rmdir()


def test_an_exception_in_a_step_of_a_rank_ends_the_engine_with_its_traceback(
    small_model: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    faulty(monkeypatch, rank_faults.FailsInAStep)
    llm = engine(small_model, 3)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"(?s)rank . failed.*rank_faults.py.*in the fifth step"):
        ids_of(llm, [[5, 6], [7]], greedy())
    assert time.monotonic() - start < 10
    assert llm.runner.ranks.closed
    with pytest.raises(EngineError, match="failed before"):
        ids_of(llm, [[5, 6]], greedy())
    llm.exit()


def test_an_error_of_rank_0_in_a_step_ends_the_engine_and_stays_what_it_is(
    small_model: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    llm = engine(small_model, 2)
    monkeypatch.setattr(worker.ModelRunner, "decode", lambda *_: 1 / 0)  # the other rank waits for us
    with pytest.raises(ZeroDivisionError):
        ids_of(llm, [[5, 6], [7]], greedy())
    assert llm.runner.ranks.closed


@BOTH
def test_a_rank_that_is_killed_in_the_middle_of_generate_is_an_error_in_seconds(
    small_model: str, nothing_left: None, overlap: bool
) -> None:
    llm = engine(small_model, 3)
    llm.overlap = overlap
    rank = llm.runner.ranks.processes[1]
    timer = threading.Timer(0.5, os.kill, (rank.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(EngineError, match="rank 2 was ended by signal 9"):
        while True:
            ids_of(llm, [[5, 6], [7]], greedy(200))
    assert time.monotonic() - timer_end(timer) < 10
    if overlap:
        llm.exit()  # but without it as well, everything has ended


def test_a_sum_that_never_ends_is_an_error_once_a_rank_has_died() -> None:
    def wait(timeout: object) -> None:
        time.sleep(0.05)
        raise RuntimeError("Operation timed out!")

    work = SimpleNamespace(wait=wait, is_completed=lambda: False)
    group = parallel.Parallel(0, 2, SimpleNamespace(allreduce=lambda *_: work, name=lambda: "gloo"))
    threading.Timer(0.2, group.abandon).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        group.all_reduce(torch.zeros(1))
    assert time.monotonic() - start > 0.1


def timer_end(timer: threading.Timer) -> float:
    timer.join()
    return time.monotonic()


def test_ctrl_c_between_and_during_steps_leaves_a_working_engine(tiny_on: dict[int, LLM]) -> None:
    llm = tiny_on[2]
    answer = GOLDEN[0]
    for process in llm.runner.ranks.processes:
        os.kill(process.pid, signal.SIGINT)  # a terminal sends it to all
    for i in range(6):
        timer = threading.Timer(0.02 + 0.013 * i, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                ids_of(llm, [a["prompt_token_ids"] for a in GOLDEN[:8]], greedy(100))
        timer.join()
        assert ids_of(llm, [answer["prompt_token_ids"]], greedy()) == [answer["token_ids"][:20]]
    assert llm.stats()["num_running"] == 0


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGQUIT])
def test_a_handler_of_another_signal_that_raises_leaves_a_working_engine(
    tiny_on: dict[int, LLM], number: signal.Signals
) -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError

    llm, answer, before = tiny_on[2], GOLDEN[0], signal.signal(number, too_late)
    try:
        for i in range(6):
            timer = threading.Timer(0.02 + 0.013 * i, os.kill, (os.getpid(), number))
            with pytest.raises(TimeoutError):
                timer.start()
                while True:
                    ids_of(llm, [a["prompt_token_ids"] for a in GOLDEN[:8]], greedy(100))
            timer.join()
            assert signal.getsignal(number) is too_late
            assert ids_of(llm, [answer["prompt_token_ids"]], greedy()) == [answer["token_ids"][:20]]
    finally:
        signal.signal(number, before)


def test_a_forked_process_ends_no_ranks_and_delays_no_exit_in_which_ctrl_c_leaves_nothing(
    small_model: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        leave()

    llm = engine(small_model, 2)
    leave = llm.runner.parallel.leave
    monkeypatch.setattr(parallel.Parallel, "leave", lambda _: interrupted())
    fork = multiprocessing.get_context("fork")
    collected, child = fork.Process(target=llm.runner._end), fork.Process(target=time.sleep, args=(60,))
    child.start()
    collected.start()
    collected.join()
    assert collected.exitcode == 0
    assert len(ids_of(llm, [[5, 6]], greedy())[0]) == 20
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.exit()
    assert time.monotonic() - start < worker.EXIT_SECONDS
    child.kill()
    for process in (child, collected):
        process.join()
        process.close()


def test_all_ranks_use_the_fewest_blocks_and_exit_may_be_called_twice(
    small_model: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    faulty(monkeypatch, rank_faults.HasFewBlocks)
    llm = engine(small_model, 2, num_kvcache_blocks=-1)
    assert llm.stats()["num_kvcache_blocks"] == 7
    assert llm.runner.model.layers[0].self_attn.attn.k_cache.shape[0] == 7
    assert len(ids_of(llm, [[5, 6]], greedy(30))[0]) == 30
    llm.exit()
    llm.exit()
    with pytest.raises(EngineError, match="exit"):
        ids_of(llm, [[5, 6]], greedy())


SCRIPT = """
import os, signal, time, weakref
weakref.finalize(signal, int)  # its hook for the end of the interpreter comes before that of multiprocessing
signal.signal(signal.SIGTERM, lambda *_: None)
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({model!r}, device="cpu", num_kvcache_blocks=9, tensor_parallel_size=2)
    llm.generate([[5, 6]], SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
    print(*(process.pid for process in llm.runner.ranks.processes), flush=True)
    {end}
"""


# a process that outlives us and holds all that we have open but for the terminal
FORK = "os.fork() or (os.setsid(), os.closerange(0, 3), time.sleep(9), os._exit(0)); "


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("del llm; 1 / 0", 1),
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.kill(llm.runner.ranks.processes[0].pid, 9); llm.exit()", 0),
        (f"{FORK}os.killpg(0, signal.SIGKILL)", -9),
    ],
)
def test_a_script_leaves_nothing_however_it_ends(small_model: str, tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "tmp").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=small_model, end=end))
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": root}
    options = {"capture_output": True, "text": True, "timeout": 60, "start_new_session": True}
    done = subprocess.run([sys.executable, script], env=env, **options)
    assert done.returncode == code, done.stderr
    assert done.stderr == "" or (code == 1 and "ZeroDivisionError" in done.stderr)
    pids = done.stdout.split()
    assert len(pids) == 1
    for _ in range(50):
        left = [pid for pid in pids if Path("/proc", pid).exists()] + list((tmp_path / "tmp").iterdir())
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_a_script_without_the_guard_of_its_main_module_is_told_so(small_model: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from nanovllm import LLM\nLLM({small_model!r}, device='cpu', tensor_parallel_size=2)\n")
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "EngineError: rank 1 ended" in done.stderr and "__name__ == '__main__'" in done.stderr
    assert list(tmp_path.iterdir()) == [script]
