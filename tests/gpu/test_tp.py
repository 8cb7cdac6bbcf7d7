"""Tensor parallelism over NCCL on two GPUs: the answers of one, memory that comes back, a rank that dies."""

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import rank_faults

from nanovllm import LLM, EngineError, OutOfMemoryError, SamplingParams
from nanovllm.engine import worker
from nanovllm.utils import parallel

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["answers"]
PROMPTS = [answer["prompt_token_ids"] for answer in GOLDEN]
EXPECTED = [answer["token_ids"] for answer in GOLDEN]
GREEDY = SamplingParams(temperature=0, max_tokens=300)


@pytest.fixture(params=["peers", "nccl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small sums through memory that all ranks see, or everything through NCCL."""
    if request.param == "nccl":
        monkeypatch.setattr(parallel, "PEER_BYTES", 0)
        monkeypatch.setattr(parallel, "PEER_ROWS", 0)
        monkeypatch.setattr(worker, "serve", rank_faults.serve_with_nccl_alone)
    return request.param


def ids_of(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("peers", {"dtype": "bfloat16"}),
        ("peers", {"dtype": "float16"}),
        ("peers", {"dtype": "float32", "enforce_eager": True}),
        (
            "peers",
            {"dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 60, "max_num_batched_tokens": 64},
        ),
        ("peers", {"dtype": "bfloat16", "async_scheduling": False}),
        ("nccl", {"dtype": "bfloat16"}),
        ("nccl", {"dtype": "float32", "enforce_eager": True}),
    ],
    indirect=["transport"],
)
def test_golden_answers_are_exact_on_two_gpus(tiny_model: str, transport: str, options: dict) -> None:
    with LLM(tiny_model, tensor_parallel_size=2, **options) as llm:
        sums = llm.runner.parallel.sums
        assert sums is not None and (sums.parts.shape[1] > 0) == (transport == "peers")
        assert bool(llm.runner.graphs) != options.get("enforce_eager", False)
        assert ids_of(llm, PROMPTS, GREEDY) == EXPECTED
        assert ids_of(llm, PROMPTS[:1], GREEDY) == EXPECTED[:1]


def test_seeded_sampling_equals_one_gpu(tiny_model: str) -> None:
    params = [SamplingParams(temperature=1.2, seed=i, max_tokens=60, ignore_eos=True) for i in range(len(PROMPTS))]
    answers = []
    for size in (1, 2):
        with LLM(tiny_model, dtype="float32", tensor_parallel_size=size) as llm:
            answers.append(ids_of(llm, PROMPTS, params))
    assert answers[0] == answers[1]


def test_controls_and_log_probabilities_equal_one_gpu(tiny_model: str) -> None:
    kinds = [
        {"top_k": 5}, {"top_p": 0.8, "n": 2}, {"min_p": 0.02, "logprobs": 3}, {"repetition_penalty": 1.4}, {},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5}, {"logit_bias": {300: 6.0}, "prompt_logprobs": 4},
        {"allowed_token_ids": [3, 400, 900]}, {"logprobs": 5, "prompt_logprobs": 0, "min_tokens": 9},
    ]  # fmt: skip
    params = [SamplingParams(temperature=1.2, seed=i, max_tokens=30, **kinds[i % len(kinds)]) for i in range(40)]
    one, two = [], []
    for size, samples in ((1, one), (2, two)):
        with LLM(tiny_model, dtype="float32", tensor_parallel_size=size) as llm:
            outputs = llm.generate(PROMPTS[:40], params, use_tqdm=False)
        samples += [sample for output in outputs for sample in output.get("samples", [output])]
    assert [sample["token_ids"] for sample in two] == [sample["token_ids"] for sample in one]
    for a, b in zip(one, two):
        for key in ("logprobs", "prompt_logprobs"):
            for x, y in zip(a.get(key) or [], b.get(key) or [], strict=True):
                assert y == pytest.approx(x, abs=1e-4) if x else y == x


def test_a_shared_prefix_that_is_read_once_gives_the_answers_of_one_gpu(tiny_model: str) -> None:
    prefix = [5 + i % 900 for i in range(1024)]
    prompts = [[*prefix, 7 + i, *prompt] for i, prompt in enumerate(PROMPTS[:60])]
    answers = []
    for size in (1, 2):
        with LLM(tiny_model, dtype="float32", tensor_parallel_size=size) as llm:
            answers.append(ids_of(llm, prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
            assert any(reads_shared for _, reads_shared in llm.runner.graphs)
    assert answers[0] == answers[1]


def test_memory_of_both_gpus_comes_back_and_engines_work_in_turn_and_at_once(tiny_model: str) -> None:
    options = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4}
    with LLM(tiny_model, **options) as llm:  # what a first engine leaves loaded does not count
        assert ids_of(llm, PROMPTS[:4], GREEDY) == EXPECTED[:4]
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    for _ in range(2):
        with LLM(tiny_model, **options) as llm, LLM(tiny_model, num_kvcache_blocks=500, **options) as other:
            assert ids_of(other, PROMPTS[:4], GREEDY) == EXPECTED[:4]
            assert ids_of(llm, PROMPTS, GREEDY) == EXPECTED
        for i in range(2):
            assert free[i] - torch.cuda.mem_get_info(i)[0] < 256 << 20


@pytest.mark.parametrize(
    ("transport", "eager"), [("peers", False), ("peers", True), ("nccl", False)], indirect=["transport"]
)
def test_a_killed_rank_is_an_error_in_seconds_and_another_engine_works(
    tiny_model: str, transport: str, eager: bool
) -> None:
    free = torch.cuda.mem_get_info(1)[0]
    llm = LLM(tiny_model, tensor_parallel_size=2, enforce_eager=eager)
    ids_of(llm, PROMPTS, GREEDY)
    killed = []

    def kill() -> None:
        os.kill(llm.runner.ranks.processes[0].pid, signal.SIGKILL)
        killed.append(time.monotonic())

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(EngineError, match="rank 1 was ended by signal 9"):
        while True:
            ids_of(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert time.monotonic() - killed[0] < 10
    llm.exit()
    assert free - torch.cuda.mem_get_info(1)[0] < 256 << 20
    with LLM(tiny_model, tensor_parallel_size=2, enforce_eager=eager) as llm:
        assert ids_of(llm, PROMPTS, GREEDY) == EXPECTED


@pytest.mark.parametrize(
    ("fault", "error", "part"),
    [
        (rank_faults.FailsWhenBuilt, EngineError, "no such rank"),
        (rank_faults.HasNoMemory, OutOfMemoryError, "7 MiB"),
        (rank_faults.FailsInAStep, EngineError, "fifth step"),
    ],
)
def test_an_exception_of_a_rank_reaches_the_caller(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, fault: type, error: type, part: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker, "serve", partial(rank_faults.serve_with, fault))
        with pytest.raises(error, match=part):
            ids_of(LLM(tiny_model, tensor_parallel_size=2), PROMPTS, GREEDY)
    with LLM(tiny_model, tensor_parallel_size=2) as llm:
        assert ids_of(llm, PROMPTS[:4], GREEDY) == EXPECTED[:4]
