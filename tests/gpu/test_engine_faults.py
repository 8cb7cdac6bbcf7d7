"""The engine on a GPU under hostile use: as tests/test_faults.py, with graphs, overlap and device memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from test_faults import ANY_USE, FAMILY, TINY, Fault, endure, engine, run, use

from nanovllm import LLM

GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def answers() -> tuple[Any, list[int]]:
    with engine(**GPU) as llm:
        return llm.tokenizer, run(llm, FAMILY[:50])[0]["token_ids"]


@pytest.mark.filterwarnings("ignore:.*preemptions", "ignore:.*CUDA graphs")
@given(*ANY_USE)
def test_after_any_calls_errors_and_interrupts_the_engine_works_and_is_empty(
    answers: tuple[Any, list[int]], options: dict[str, Any], overlap: bool, crowded: bool, calls: list[Any]
) -> None:
    llm = engine(overlap=overlap, **GPU, **options)
    llm.tokenizer, expected = answers
    use(llm, expected, crowded, calls)


@pytest.mark.filterwarnings("ignore:.*preemptions")
def test_thousands_of_requests_leave_device_memory_as_it_was(answers: tuple[Any, list[int]]) -> None:
    endure(20_000 if settings.default.max_examples > 100 else 2000, answers[0], overlap=True, **GPU)


def test_eager_mode_by_accident_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="CUDA graphs"):
        LLM(TINY, attention_backend="torch", num_kvcache_blocks=4).exit()


def test_a_shared_prefix_without_memory_for_its_graph_gives_the_same_answers() -> None:
    prompts = [[*FAMILY * 9, i] for i in range(40)]
    with engine(overlap=True, num_kvcache_blocks=2000, **GPU) as llm:
        expected = run(llm, prompts)
        assert any(reads_shared for _, reads_shared in llm.runner.graphs)
    with engine(overlap=True, num_kvcache_blocks=2000, **GPU) as llm:
        decode_step = llm.runner._decode_step

        def fail(*args: Any, **kwargs: Any) -> None:
            decode_step(*args, **kwargs)
            if torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError

        llm.runner._decode_step = fail
        assert [o["token_ids"] for o in run(llm, prompts)] == [o["token_ids"] for o in expected]


def test_an_interrupt_with_a_step_in_flight_leaves_the_device_usable() -> None:
    with engine(overlap=True, **GPU) as llm:
        expected = run(llm, FAMILY)[0]["token_ids"]
        for count in range(1, 8):
            with Fault(llm, "after launch", count, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                run(llm, FAMILY)
            assert run(llm, FAMILY)[0]["token_ids"] == expected
