"""Log-probabilities of prompts and completions against transformers in fp32, whatever the engine does meanwhile."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import Sampler
from nanovllm.utils.parallel import Parallel

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def engine(folder: str, overlap: bool = False, **options: Any) -> LLM:
    settings = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 400, **options}
    llm = LLM(folder, **settings)
    llm.overlap = overlap
    return llm


def random_prompts(n: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@torch.inference_mode()
def check(reference: Any, output: dict[str, Any], params: SamplingParams) -> None:
    """One entry a token with the right ids and values, and no list that was not asked for."""
    prompt, ids = output["prompt_token_ids"], output["prompt_token_ids"] + output["token_ids"]
    exact = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = []
    for name, k, first in (("prompt_logprobs", params.prompt_logprobs, 0), ("logprobs", params.logprobs, len(prompt))):
        assert (name in output) is (k is not None)
        found = output.get(name, [])
        assert len(found) == (0 if k is None else len(prompt) if first == 0 else len(output["token_ids"]))
        entries += [(first + i, entry, k) for i, entry in enumerate(found)]
    for i, entry, k in entries:
        if i == 0:
            assert entry is None
            continue
        row = exact[i - 1]
        assert ids[i] in entry and k <= len(entry) <= k + 1
        assert list(entry.values()) == pytest.approx([row[j].item() for j in entry], abs=1e-4)
        assert list(entry.values())[:k] == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)
    if params.logprobs is not None:
        total = sum(entry[i] for entry, i in zip(output["logprobs"], output["token_ids"]))
        assert output["cumulative_logprob"] == pytest.approx(total)


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 13},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
        {"num_kvcache_blocks": 12, "max_num_batched_tokens": 40},
    ],
    ids=["plain", "chunks", "no caching", "preemptions"],
)
def test_a_mixed_batch_has_the_log_probabilities_of_transformers(
    tiny_model: str, reference: Any, options: dict[str, Any], overlap: bool
) -> None:
    prompts = random_prompts(10, 60)
    prompts[5:7] = [prompts[4]] * 2  # admitted together, and only some of them may share blocks
    params = [
        SamplingParams(
            temperature=i % 3, seed=i, max_tokens=24, ignore_eos=True,
            logprobs=(None, 0, 3, 7)[i % 4], prompt_logprobs=(2, None, 0, 5, None)[i % 5],
        )
        for i in range(10)
    ]  # fmt: skip
    with engine(tiny_model, overlap, **options) as llm:
        llm.scheduler._growth_fits = lambda *_: True
        for _ in range(2):  # the second time most blocks are cached
            for output, p in zip(llm.generate(prompts, params, use_tqdm=False), params):
                check(reference, output, p)
        preemptions = llm.stats()["preemptions"]
        assert preemptions > 3 if "num_kvcache_blocks" in options else preemptions == 0
        assert llm.stats()["num_free_blocks"] == llm.stats()["num_kvcache_blocks"]


def test_more_rows_than_are_computed_at_a_time(tiny_model: str, reference: Any) -> None:
    params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
    prompts = random_prompts(80, 12) + random_prompts(1, 2000)
    with engine(tiny_model) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False)[-2:]:
            check(reference, output, params)


@BOTH
def test_every_way_to_end_leaves_one_entry_a_token(tiny_model: str, reference: Any, overlap: bool) -> None:
    with engine(tiny_model, overlap) as llm:
        prompt = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "introduce yourself"}], tokenize=True, add_generation_prompt=True,
            return_dict=False,
        )  # fmt: skip
        base: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "logprobs": 1}
        (free,) = llm.generate([prompt], SamplingParams(**base), use_tqdm=False)
        ends = [
            {}, {"stop": "scratch"}, {"stop_token_ids": [free["token_ids"][7]]}, {"max_tokens": 5},
            {"min_tokens": 60, "stop": "scratch"}, {"min_tokens": 20, "stop_token_ids": free["token_ids"][:9]},
        ]  # fmt: skip
        params = [SamplingParams(**{**base, **end}) for end in ends]
        for output, p in zip(llm.generate([prompt] * len(ends), params, use_tqdm=False), params):
            check(reference, output, p)  # of the raw logits, also where `min_tokens` rules ids out


def test_a_scored_prompt_is_computed_whole_and_its_blocks_are_shared(tiny_model: str) -> None:
    prompt = random_prompts(1, 60, seed=1)[0] * 4
    with engine(tiny_model) as llm:
        cached = [
            llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=k), use_tqdm=False)[0]
            for k in (0, 0, None)
        ]
    assert [output["num_cached_tokens"] for output in cached] == [0, 0, (len(prompt) - 1) // 16 * 16]


def test_requests_without_log_probabilities_compute_none(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tiny_model) as llm:
        monkeypatch.setattr(Sampler, "logprobs", lambda *_: 1 / 0)
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=9)
        llm.generate([[5, 6, 7]], params, use_tqdm=False)


def test_pieces_of_a_stream_have_an_entry_for_each_of_their_tokens(tiny_model: str) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    with engine(tiny_model) as llm:
        (whole,) = llm.generate([[5, 6]], params, use_tqdm=False)
        pieces = list(llm.stream([5, 6], params))
    assert all(list(map(len, piece["logprobs"])) and piece["token_ids"] for piece in pieces)
    assert [len(piece["logprobs"]) for piece in pieces] == [len(piece["token_ids"]) for piece in pieces]
    joined = [entry for piece in pieces for entry in piece["logprobs"]]
    assert list(map(set, joined)) == list(map(set, whole["logprobs"]))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_ids_than_the_vocabulary_has_are_refused(tiny_model: str, name: str) -> None:
    with engine(tiny_model) as llm:
        vocab = llm.config.hf.vocab_size
        with pytest.raises(ValueError, match=f"prompt 0: {name}={vocab + 1}: must be at most {vocab}"):
            llm.generate([[5]], SamplingParams(**{name: vocab + 1}), use_tqdm=False)
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=1, **{name: vocab}), use_tqdm=False)
        assert sorted(output[name][-1]) == list(range(vocab))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_combine_their_shares_of_the_vocabulary(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, k = 10, 4
    logits = torch.randn(130, vocab, generator=torch.Generator().manual_seed(0)) * 5
    ids = torch.arange(130) % vocab
    share = Parallel(0, size).share(vocab)
    shares = [logits[:, r * share : (r + 1) * share] for r in range(size)]
    samplers = [Sampler(Parallel(r, size), r * share) for r in range(size)]
    tables = torch.stack([s._share_of_logprobs(part, ids, k) for s, part in zip(samplers, shares)])
    monkeypatch.setattr(Parallel, "all_gather", lambda *_: tables)
    exact = logits.log_softmax(1)
    for sampler, part in zip(samplers, shares):
        same_ids, own, best, values = sampler.logprobs(part, ids, k)
        assert torch.equal(same_ids, ids) and torch.equal(best, exact.topk(k).indices)
        torch.testing.assert_close(own, exact[torch.arange(130), ids])
        torch.testing.assert_close(values, exact.topk(k).values)
