"""n > 1: several samples of one prompt, which is computed once."""

import struct
from typing import Any

import pytest
import xxhash

from nanovllm import LLM, SamplingParams

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
PROMPTS = [[7] * 37, list(range(100, 132)), [5], [9] * 70]  # full and partial last blocks of 16


def engine(folder: str, overlap: bool = False, **options: Any) -> LLM:
    settings = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 400, **options}
    llm = LLM(folder, **settings)
    llm.overlap = overlap
    return llm


def sampled(seed: int | None = None, n: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "n": n, "max_tokens": 24, "ignore_eos": True, **fields})


def seed_of_sample(seed: int, i: int) -> int:
    return xxhash.xxh64_intdigest(struct.pack("<Q", seed % 2**64), seed=i) if i else seed


def assert_empty(llm: LLM) -> None:
    stats = llm.stats()
    assert llm.is_finished() and not llm.sequences and not llm.streams
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_kvcache_blocks"]


@pytest.fixture(scope="module")
def expected(random_model: str) -> list[list[list[int]]]:
    """Tokens of four samples of each prompt, from requests of their own without any sharing."""
    params = [sampled(seed_of_sample(-3 + p, i)) for p in range(len(PROMPTS)) for i in range(4)]
    with engine(random_model, enable_prefix_caching=False) as llm:
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(4)], params, use_tqdm=False)
    ids = [output["token_ids"] for output in outputs]
    return [ids[i : i + 4] for i in range(0, len(ids), 4)]


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 11},
        {"max_num_seqs": 3},
        {"num_kvcache_blocks": 8, "max_num_batched_tokens": 40},
    ],
    ids=["plain", "no caching", "chunks", "fewer slots than samples", "preemptions"],
)
def test_samples_are_what_requests_with_their_seeds_get(
    random_model: str, expected: list[list[list[int]]], options: dict[str, Any], overlap: bool
) -> None:
    params = [sampled(-3 + p, n=4, logprobs=0) for p in range(len(PROMPTS))]
    with engine(random_model, overlap, **options) as llm:
        llm.scheduler._growth_fits = lambda *_: True
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output, prompt, ids in zip(outputs, PROMPTS, expected):
            samples = output["samples"]
            assert [sample["token_ids"] for sample in samples] == ids
            assert {key: output[key] for key in samples[0]} == samples[0]
            assert all(sample["prompt_token_ids"] == prompt for sample in samples)
            assert {sample["seq_id"] for sample in samples} == {output["seq_id"]}
            assert all(list(entry) == [i] for s in samples for entry, i in zip(s["logprobs"], s["token_ids"]))
        if "num_kvcache_blocks" in options:
            assert llm.stats()["preemptions"] > 3
        assert_empty(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_the_prompt_is_computed_once(random_model: str, caching: bool, max_tokens: int) -> None:
    with engine(random_model, enable_prefix_caching=caching) as llm:
        llm.generate(PROMPTS, sampled(1, n=4, max_tokens=max_tokens), use_tqdm=False)
        stats = llm.stats()
        computed = stats["prompt_tokens"] - stats["cached_prompt_tokens"]
        assert computed == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
        assert stats["steps"] == max_tokens


def test_samples_differ_and_the_first_is_that_of_a_single_request(random_model: str) -> None:
    with engine(random_model) as llm:
        (one,) = llm.generate([PROMPTS[0]], sampled(7), use_tqdm=False)
        (many,) = llm.generate([PROMPTS[0]], sampled(7, n=16), use_tqdm=False)
        ids = [tuple(sample["token_ids"]) for sample in many["samples"]]
        assert list(ids[0]) == one["token_ids"] and len(set(ids)) == 16
        unseeded = llm.generate([PROMPTS[0]] * 2, sampled(n=4), use_tqdm=False)
        assert len({tuple(sample["token_ids"]) for output in unseeded for sample in output["samples"]}) == 8


def test_prompt_log_probabilities_are_those_of_one_request_for_all_samples(random_model: str) -> None:
    with engine(random_model) as llm:
        (output,) = llm.generate([PROMPTS[0]], sampled(7, n=3, prompt_logprobs=1), use_tqdm=False)
    assert all(sample["prompt_logprobs"] == output["prompt_logprobs"] for sample in output["samples"])
    assert len(output["prompt_logprobs"]) == len(PROMPTS[0])


@BOTH
def test_a_request_is_returned_once_when_its_last_sample_has_ended(random_model: str, overlap: bool) -> None:
    with engine(random_model, overlap) as llm:
        (free,) = llm.generate([PROMPTS[0]], sampled(7, n=4), use_tqdm=False)
        tokens = free["samples"][1]["token_ids"]
        stop = next(i for i in tokens if tokens.index(i) >= 3)
        params = sampled(7, n=4, stop_token_ids=[stop])
        seq_id = llm.add_request(PROMPTS[0], params)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step(stream=True)
        (output,) = outputs
        assert output["seq_id"] == seq_id
        ends = [ids.index(stop) + 1 if stop in ids else 24 for ids in (s["token_ids"] for s in free["samples"])]
        assert [len(sample["token_ids"]) for sample in output["samples"]] == ends
        assert 4 <= ends[1] < max(ends)
        assert_empty(llm)


@BOTH
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_ends_all_samples(random_model: str, steps: int, overlap: bool) -> None:
    with engine(random_model, overlap, max_num_seqs=3, max_num_batched_tokens=40) as llm:
        seq_id = llm.add_request(PROMPTS[3], sampled(7, n=4))
        other = llm.add_request(PROMPTS[0], sampled(8, n=2))
        for _ in range(steps):
            llm.step()
        llm.abort(seq_id)
        found = []
        while not llm.is_finished():
            found += llm.step()
        assert [output["seq_id"] for output in found] == [other]
        assert_empty(llm)


def test_an_error_in_a_step_leaves_no_sample_behind(random_model: str) -> None:
    with engine(random_model) as llm:
        for _ in range(3):
            llm.add_request(PROMPTS[0], sampled(7, n=4))
        llm.step()
        llm.runner.launch = lambda batch: 1 / 0
        with pytest.raises(ZeroDivisionError):
            llm.step()
        assert_empty(llm)


def test_a_stream_of_several_samples_is_refused(random_model: str) -> None:
    with engine(random_model) as llm:
        with pytest.raises(ValueError, match="n=2: must be 1 in a stream"):
            llm.stream([5], sampled(n=2))
        assert_empty(llm)
