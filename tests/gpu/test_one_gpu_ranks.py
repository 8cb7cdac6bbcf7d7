"""Ranks that share one GPU: the kernels of tensor parallelism, of up to eight ranks, on any machine with a GPU.

They take turns on the GPU, so this is slow; NCCL, which refuses this, is the only part that is missing.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import rank_faults
from checkpoints import save_random_qwen3

from nanovllm import LLM, EngineError, SamplingParams
from nanovllm.engine import worker

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["answers"]
PROMPTS = [answer["prompt_token_ids"] for answer in GOLDEN]
EXPECTED = [answer["token_ids"] for answer in GOLDEN]
GREEDY = SamplingParams(temperature=0, max_tokens=300)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_faults.share_one_gpu(monkeypatch.setattr)
    monkeypatch.setattr(worker, "_obstacle", lambda *_: "")
    monkeypatch.setattr(worker, "serve", rank_faults.serve_on_one_gpu)


def engine(folder: str, size: int, **options: object) -> LLM:
    return LLM(folder, tensor_parallel_size=size, **{"num_kvcache_blocks": 400, "max_num_seqs": 64, **options})


def ids_of(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"dtype": "bfloat16"}),
        (2, {"dtype": "float16", "enforce_eager": True}),
        (4, {"dtype": "bfloat16"}),
        (4, {"dtype": "float32"}),
    ],
)
def test_golden_answers_are_exact(tiny_model: str, size: int, options: dict) -> None:
    with engine(tiny_model, size, **options) as llm:
        assert llm.runner.parallel.sums is not None
        assert ids_of(llm, PROMPTS[:48], GREEDY) == EXPECTED[:48]
        assert ids_of(llm, PROMPTS[:1], GREEDY) == EXPECTED[:1]


def test_controls_behind_a_shared_prefix_on_four_ranks_give_the_answers_of_one(tiny_model: str) -> None:
    kinds = [{}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.4}, {"logprobs": 3}, {"logit_bias": {300: 6.0}}]
    fields = {"temperature": 1.2, "max_tokens": 20, "ignore_eos": True}
    params = [SamplingParams(seed=i, **fields, **kinds[i % len(kinds)]) for i in range(36)]
    prefix = [5 + i % 900 for i in range(1024)]
    prompts = [[*prefix, 7 + i, *prompt] for i, prompt in enumerate(PROMPTS[:36])]
    answers = []
    for size in (1, 4):
        with engine(tiny_model, size, dtype="float32") as llm:
            answers.append(ids_of(llm, prompts, params))
            assert any(reads_shared for _, reads_shared in llm.runner.graphs)
    assert answers[0] == answers[1]


def test_eight_ranks_with_replicated_kv_heads_and_odd_sizes_sample_as_one(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1023, "intermediate_size": 100}
    folder = save_random_qwen3(tmp_path, **fields)
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(9)]
    answers = []
    for size in (1, 8):
        with engine(folder, size, dtype="float32", max_num_seqs=16) as llm:
            answers.append(ids_of(llm, PROMPTS[:9], params))
    assert answers[0] == answers[1]


def test_a_killed_rank_of_four_is_an_error_in_seconds_and_another_engine_works(tiny_model: str) -> None:
    llm = engine(tiny_model, 4)
    ids_of(llm, PROMPTS[:4], GREEDY)
    killed = []

    def kill() -> None:
        os.kill(llm.runner.ranks.processes[1].pid, signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Timer(0.3, kill).start()
    with pytest.raises(EngineError, match="rank 2 was ended by signal 9"):
        while True:
            ids_of(llm, PROMPTS[:48], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert time.monotonic() - killed[0] < 10
    llm.exit()
    with engine(tiny_model, 4) as llm:
        assert ids_of(llm, PROMPTS[:4], GREEDY) == EXPECTED[:4]
