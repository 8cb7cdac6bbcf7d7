"""LLM as a script uses it: prompts, outputs, ends, limits, seeds, interruptions, several engines, streams."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_random_qwen3

from nanovllm import LLM, EngineError, SamplingParams
from nanovllm.layers.sampler import Sampler

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text(encoding="utf-8"))["answers"]
ANSWER = GOLDEN[0]  # "introduce yourself"
TEXT, PROMPT, IDS = ANSWER["text"], ANSWER["prompt_token_ids"], ANSWER["token_ids"]
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def engine(folder: str | Path, overlap: bool = False, **options: Any) -> LLM:
    settings = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 400, "max_num_seqs": 64, **options}
    llm = LLM(str(folder), **settings)
    llm.overlap = overlap
    return llm


def run(llm: LLM, prompts: Any, params: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **kwargs)


def ids_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def random_prompts(n: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def assert_empty(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_kvcache_blocks"]
    assert llm.is_finished()
    assert not llm.sequences
    assert sorted(llm.scheduler.free_slots) == list(range(len(llm.scheduler.free_slots)))


def say(llm: LLM, ids: list[int]) -> None:
    """Make the model answer `ids` to every prompt of one token."""

    class Script(Sampler):
        def __call__(
            self, logits: Any, temperatures: Any, seeds: Any, positions: torch.Tensor, rows: torch.Tensor,
            last_tokens: torch.Tensor, out: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            said = [ids[p - 1] if p <= len(ids) else 100 for p in positions.tolist()]
            last_tokens[rows] = out.copy_(torch.tensor(said))
            return out

    llm.runner.sampler = Script(llm.runner.parallel, 0)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model that is as small as can be, without a tokenizer."""
    return save_random_qwen3(tmp_path_factory.mktemp("small"), hidden_size=48, num_hidden_layers=2)


@pytest.fixture(scope="module")
def shared_small(small_model: str) -> Iterator[LLM]:
    with engine(small_model) as llm:
        yield llm


@pytest.fixture
def small(shared_small: LLM) -> LLM:
    assert_empty(shared_small)
    return shared_small


@pytest.fixture(scope="module")
def shared_tiny(tiny_model: str) -> Iterator[LLM]:
    with engine(tiny_model) as llm:
        yield llm


@pytest.fixture
def tiny(shared_tiny: LLM) -> LLM:
    assert_empty(shared_tiny)
    return shared_tiny


@pytest.fixture
def tiny_copy(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}))


# Prompts


def test_a_string_is_one_prompt(tiny: LLM) -> None:
    outputs = run(tiny, "introduce yourself")
    assert len(outputs) == 1
    assert outputs[0]["prompt_token_ids"] == tiny.tokenizer.encode("introduce yourself")


def test_a_list_of_ids_is_one_prompt(small: LLM) -> None:
    (output,) = run(small, [5, 6, 7])
    assert output["prompt_token_ids"] == [5, 6, 7]


def test_strings_and_ids_can_be_mixed_and_keep_their_order(tiny: LLM) -> None:
    outputs = run(tiny, ["hello", [5, 6], "you", (7,)])
    words = [tiny.tokenizer.encode(text) for text in ("hello", "you")]
    assert [output["prompt_token_ids"] for output in outputs] == [words[0], [5, 6], words[1], [7]]


@pytest.mark.parametrize(
    "prompts",
    [
        (5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.uint8), [np.int64(5), np.int32(6), 7],
        torch.tensor([5, 6, 7]), [[5, 6, 7]], ([5, 6, 7],), [np.array([5, 6, 7])], [torch.tensor([5, 6, 7])],
        np.array([[5, 6, 7]]), torch.tensor([[5, 6, 7]]), [[np.int64(5), 6, 7]],
    ],
    ids=lambda prompts: f"{type(prompts).__name__}-{type(prompts[0]).__name__}",
)  # fmt: skip
def test_tuples_arrays_and_tensors_of_ids_are_prompts(small: LLM, prompts: Any) -> None:
    (output,) = run(small, prompts)
    assert output["prompt_token_ids"] == [5, 6, 7]
    assert {type(i) for i in output["prompt_token_ids"]} == {int}
    assert output["token_ids"] == run(small, [5, 6, 7])[0]["token_ids"]


def test_no_prompts_give_no_outputs(small: LLM) -> None:
    assert run(small, []) == []
    assert small.chat([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("bad", "error", "part"),
    [
        ([], ValueError, "empty"),
        ([5, True], TypeError, "True"),
        ([False], TypeError, "False"),
        ([5, 1.0], TypeError, "1.0"),
        ([5, "6"], TypeError, "'6'"),
        ([5, None], TypeError, "None"),
        ([[5]], TypeError, r"\[5\]"),
        (np.array([0.5]), TypeError, "0.5"),
        (torch.tensor([True]), TypeError, "True"),
        ([0, 1000], ValueError, r"1000.*0\.\.999"),
        ([0, 10**9], ValueError, r"1000000000.*0\.\.999"),
        ([10**30], ValueError, r"0\.\.999"),
        ([-1], ValueError, r"-1.*0\.\.999"),
        ([5] * 2048, ValueError, "2048 tokens.*2047"),
        (None, TypeError, "NoneType"),
        (b"text", TypeError, "bytes"),
        ({1: 2}, TypeError, "dict"),
        (1.5, TypeError, "float"),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_a_bad_prompt_is_refused_with_its_index_and_nothing_runs(
    small: LLM, k: int, bad: Any, error: type[Exception], part: str
) -> None:
    prompts: list[Any] = [[5, 6]] * 4
    prompts[k] = bad
    steps = small.stats()["steps"]
    with pytest.raises(error, match=f"prompt {k}.*{part}"):
        run(small, prompts)
    assert small.stats()["steps"] == steps
    assert_empty(small)


@pytest.mark.parametrize("bad", [[[]], [True, False], [[True]], [[5, 10**9]], [5, 10**9]])
def test_a_lone_bad_prompt_is_prompt_0(small: LLM, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prompt 0"):
        run(small, bad)


@pytest.mark.parametrize("bad", [5, None, 1.5, b"text", {"prompt": "x"}, {1, 2}, iter([[5]])])
def test_something_that_is_no_prompt_at_all_is_a_type_error(small: LLM, bad: Any) -> None:
    with pytest.raises(TypeError, match="must be a string"):
        run(small, bad)


def test_an_empty_string_is_refused_because_the_tokenizer_gives_nothing(tiny: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 0.*empty"):
        run(tiny, "")
    with pytest.raises(ValueError, match=r"prompt 1.*empty"):
        run(tiny, ["hello", ""])


def test_a_string_for_a_model_without_tokenizer_says_that_ids_work(small: LLM) -> None:
    with pytest.raises(ValueError, match=r"no usable tokenizer.*ids work"):
        run(small, "hello")


def test_the_list_of_the_caller_is_not_changed(small: LLM) -> None:
    prompt = [5, 6, 7]
    run(small, [prompt, prompt])
    assert prompt == [5, 6, 7]


# Parameters


def test_without_parameters_the_defaults_hold(small: LLM) -> None:
    (output,) = small.generate([[5, 6]], use_tqdm=False)
    assert len(output["token_ids"]) == 64 or output["finish_reason"] == "stop"


def test_each_prompt_can_have_its_own_parameters(small: LLM) -> None:
    outputs = run(small, [[5], [6], [7]], [greedy(n) for n in (1, 5, 3)])
    assert [len(output["token_ids"]) for output in outputs] == [1, 5, 3]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_wrong_number_of_parameters_is_refused(small: LLM, n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} entries.*2 prompts"):
        small.generate([[5], [6]], [greedy()] * n, use_tqdm=False)


@pytest.mark.parametrize("bad", [{"temperature": 0}, 5, [greedy(), None], "greedy"])
def test_parameters_of_another_type_are_refused(small: LLM, bad: Any) -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        small.generate([[5], [6]], bad, use_tqdm=False)
    with pytest.raises(TypeError, match="SamplingParams"):
        small.add_request([5], bad)


def test_a_stop_id_outside_of_the_vocabulary_is_refused(small: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: stop_token_ids.*1000.*0\.\.999"):
        run(small, [[5], [6]], [greedy(), greedy(stop_token_ids=[1000])])


# Outputs


def test_an_output_has_the_documented_keys_and_meanings(tiny: LLM) -> None:
    output, other = run(tiny, [PROMPT, [5]], [greedy(300, ignore_eos=False), greedy(3)])
    assert set(output) >= {
        "text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids", "num_cached_tokens", "seq_id",
    }  # fmt: skip
    assert output["text"] == TEXT
    assert output["token_ids"] == IDS  # the end token included
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", None)
    assert output["prompt_token_ids"] == PROMPT
    assert output["num_cached_tokens"] in (0, 16)
    assert isinstance(output["seq_id"], int)
    assert other["seq_id"] != output["seq_id"]
    assert (other["finish_reason"], other["stop_reason"], len(other["token_ids"])) == ("length", None, 3)
    json.dumps([output, other])  # plain Python all through


def test_cached_tokens_of_the_second_request_are_counted(small_model: str) -> None:
    prompt = random_prompts(1, seed=3)[0] * 10
    with engine(small_model) as llm:
        first, second = (run(llm, [prompt])[0] for _ in range(2))
        assert first["num_cached_tokens"] == 0
        assert second["num_cached_tokens"] == (len(prompt) - 1) // 16 * 16 > 0
        assert first["token_ids"] == second["token_ids"]


def test_special_tokens_are_not_in_the_text_unless_asked_for(tiny: LLM) -> None:
    fields: dict[str, Any] = {"ignore_eos": False, "include_stop_str_in_output": True}
    hidden, shown, cut = run(
        tiny,
        [PROMPT] * 3,
        [
            greedy(300, **fields),
            greedy(300, skip_special_tokens=False, **fields),
            greedy(300, skip_special_tokens=False, ignore_eos=False),
        ],
    )
    assert hidden["text"] == TEXT
    assert shown["text"] == TEXT + "<|im_end|>"
    assert cut["text"] == TEXT
    assert hidden["token_ids"] == shown["token_ids"] == cut["token_ids"] == IDS


def test_special_tokens_in_the_middle_are_not_in_the_text(tiny_model: str) -> None:
    with engine(tiny_model) as llm:
        words = llm.tokenizer.encode("some words")
        say(llm, [0, *words[:1], 2, *words[1:], 1])
        (output,) = run(llm, [[50]], greedy(len(words) + 3))
        assert output["text"] == "some words"


def test_without_detokenization_the_text_is_empty(tiny: LLM) -> None:
    (output,) = run(tiny, [PROMPT], greedy(300, detokenize=False, ignore_eos=False))
    assert output["text"] == ""
    assert output["token_ids"] == IDS


def test_without_a_tokenizer_the_text_is_empty(small: LLM) -> None:
    (output,) = run(small, [[5]])
    assert output["text"] == ""


# Ends


def test_every_end_id_of_config_generation_config_and_tokenizer_stops(tiny_copy: Path) -> None:
    edit_json(tiny_copy / "config.json", eos_token_id=107)
    edit_json(tiny_copy / "generation_config.json", eos_token_id=[108, 109])
    with engine(tiny_copy) as llm:
        for end in (107, 108, 109, llm.tokenizer.eos_token_id):
            say(llm, [101, 102, end, 103])
            (output,) = run(llm, [[50]], greedy(ignore_eos=False))
            assert output["token_ids"] == [101, 102, end]
            assert (output["finish_reason"], output["stop_reason"]) == ("stop", None)
            assert output["text"] == llm.tokenizer.decode([101, 102])
            (ignored,) = run(llm, [[50]], greedy(4))
            assert ignored["token_ids"] == [101, 102, end, 103]
            assert ignored["finish_reason"] == "length"


@BOTH
def test_a_stop_id_ends_the_request_and_is_the_reason(tiny_model: str, overlap: bool) -> None:
    with engine(tiny_model, overlap) as llm:
        stop_id = IDS[5]
        outputs = run(llm, [PROMPT, PROMPT], [greedy(20, stop_token_ids=[stop_id, 999]), greedy(20)])
        end = IDS.index(stop_id) + 1
        assert outputs[0]["token_ids"] == IDS[:end]
        assert (outputs[0]["finish_reason"], outputs[0]["stop_reason"]) == ("stop", stop_id)
        assert outputs[0]["text"] == llm.tokenizer.decode(IDS[: end - 1])
        assert outputs[1]["token_ids"] == IDS[:20]
        (included,) = run(llm, [PROMPT], greedy(20, stop_token_ids=[stop_id], include_stop_str_in_output=True))
        assert included["text"] == llm.tokenizer.decode(IDS[:end])
        assert_empty(llm)


def test_a_stop_id_that_is_an_end_id_still_stops_when_end_ids_are_ignored(tiny: LLM) -> None:
    (output,) = run(tiny, [PROMPT], greedy(300, stop_token_ids=[2]))
    assert output["token_ids"] == IDS
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", 2)


@BOTH
def test_a_stop_string_ends_the_text_wherever_tokens_begin(tiny_model: str, overlap: bool) -> None:
    rng = random.Random(0)
    starts = [rng.randrange(len(TEXT) - 12) for _ in range(30)]
    stops = [TEXT[start : start + rng.randint(1, 12)] for start in starts]
    with engine(tiny_model, overlap) as llm:
        decode = llm.tokenizer.decode
        params = [
            greedy(300, ignore_eos=False, stop=stop, include_stop_str_in_output=i % 2 == 1)
            for i, stop in enumerate(stops)
        ]
        for i, (stop, output) in enumerate(zip(stops, run(llm, [PROMPT] * len(stops), params))):
            end = TEXT.index(stop) + (len(stop) if i % 2 else 0)
            assert output["text"] == TEXT[:end]
            assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
            ids = output["token_ids"]
            assert ids == IDS[: len(ids)]
            assert stop in decode(ids)
            assert stop not in decode(ids[:-1])  # not a token too many
        assert_empty(llm)


def test_of_several_stop_strings_the_first_in_the_text_counts(tiny: LLM) -> None:
    (output,) = run(tiny, [PROMPT], greedy(300, stop=["scratch", "Qwen3 model", "nowhere", "tiny"]))
    assert output["text"] == TEXT[: TEXT.index("tiny")]
    assert output["stop_reason"] == "tiny"


def test_a_stop_string_that_never_occurs_changes_nothing(tiny: LLM) -> None:
    (output,) = run(tiny, [PROMPT], greedy(300, ignore_eos=False, stop=["I am a tinz", TEXT + "!"]))
    assert output["text"] == TEXT
    assert output["stop_reason"] is None


def test_a_stop_string_of_several_bytes_is_found(tiny_model: str) -> None:
    with engine(tiny_model) as llm:
        text = "ok 你好 🙂 done"
        ids = llm.tokenizer.encode(text)
        say(llm, ids)
        for stop in ("好", "🙂", "你好 🙂", " 🙂 d"):
            (output,) = run(llm, [[50]], greedy(len(ids), stop=stop))
            assert output["text"] == text[: text.index(stop)]
        (whole,) = run(llm, [[50]], greedy(len(ids)))
        assert whole["text"] == text


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_nothing_stops_before_min_tokens(tiny_copy: Path, min_tokens: int) -> None:
    with engine(tiny_copy) as llm:
        (by_id,) = run(llm, [PROMPT], greedy(60, min_tokens=min_tokens, stop_token_ids=IDS[:3]))
        assert len(by_id["token_ids"]) >= max(1, min_tokens)
        (by_text,) = run(llm, [PROMPT], greedy(60, min_tokens=min_tokens, stop="a", ignore_eos=False))
        known = llm.tokenizer.decode(IDS[: max(0, min_tokens - 1)])  # the token after it may hold the stop
        assert by_text["text"] == TEXT[: TEXT.index("a", len(known))]
        assert len(by_text["token_ids"]) >= max(1, min_tokens)


def test_an_end_id_cannot_even_be_sampled_before_min_tokens(small: LLM) -> None:
    answers = ((n, run(small, [[5, 6, n]], greedy(12))[0]) for n in range(10, 100))
    n, free, end = next((n, a, a["token_ids"][3]) for n, a in answers if a["token_ids"].index(a["token_ids"][3]) == 3)
    (output,) = run(small, [[5, 6, n]], greedy(12, stop_token_ids=[end], min_tokens=8))
    assert end not in output["token_ids"][:8]
    assert output["token_ids"][:3] == free["token_ids"][:3]
    other, same = run(small, [[5, 6, n], [5, 6, n]], [greedy(12), greedy(12, stop_token_ids=[end], min_tokens=8)])
    assert (other["token_ids"], same["token_ids"]) == (free["token_ids"], output["token_ids"])


# Lengths and limits


@BOTH
def test_one_token_is_possible(small_model: str, overlap: bool) -> None:
    prompts = random_prompts(5)
    with engine(small_model, overlap) as llm:
        outputs = run(llm, prompts, greedy(1))
        assert [len(output["token_ids"]) for output in outputs] == [1] * 5
        assert ids_of(outputs) == [ids[:1] for ids in ids_of(run(llm, prompts, greedy(4)))]
        assert_empty(llm)


@BOTH
@pytest.mark.parametrize("max_model_len", [31, 32, 33])
@pytest.mark.parametrize("max_tokens", [None, 100, "exact"])
def test_prompt_and_completion_fill_max_model_len_exactly(
    small_model: str, small: LLM, max_model_len: int, max_tokens: Any, overlap: bool
) -> None:
    prompts = [[7] * n for n in (1, 15, 16, 17, max_model_len - 1)]
    left = [max_model_len - len(prompt) for prompt in prompts]
    with engine(small_model, overlap, max_model_len=max_model_len) as llm:
        outputs = run(llm, prompts, [greedy(n if max_tokens == "exact" else max_tokens) for n in left])
        assert [len(output["token_ids"]) for output in outputs] == left
        assert {output["finish_reason"] for output in outputs} == {"length"}
        with pytest.raises(ValueError, match=f"prompt 1.*{max_model_len} tokens.*{max_model_len - 1}"):
            run(llm, [[7], [7] * max_model_len])
        assert_empty(llm)
    assert ids_of(outputs) == ids_of(run(small, prompts, [greedy(n) for n in left]))


def test_a_prompt_longer_than_the_pool_is_refused(small_model: str) -> None:
    with engine(small_model, num_kvcache_blocks=4) as llm:
        with pytest.raises(ValueError, match=r"prompt 1.*65 tokens.*at most 64"):
            run(llm, [[7], [7] * 65])
        (output,) = run(llm, [[7] * 64])
        assert (len(output["token_ids"]), output["finish_reason"]) == (1, "length")
        assert_empty(llm)


@BOTH
def test_a_request_that_outgrows_the_pool_ends_with_length_and_the_others_go_on(
    small_model: str, small: LLM, overlap: bool
) -> None:
    prompts = random_prompts(6, 20)
    prompts[2] = random_prompts(1, seed=4)[0][:5] * 12
    expected = ids_of(run(small, prompts, greedy(40)))
    with engine(small_model, overlap, num_kvcache_blocks=4) as llm:
        outputs = run(llm, prompts, greedy(40))
        room = 65 - len(prompts[2])
        assert room < 40
        assert ids_of(outputs) == [ids[:room] if i == 2 else ids for i, ids in enumerate(expected)]
        assert {output["finish_reason"] for output in outputs} == {"length"}
        assert_empty(llm)


@BOTH
def test_max_num_seqs_is_never_exceeded(small_model: str, small: LLM, overlap: bool) -> None:
    prompts = random_prompts(40)
    params = [greedy(1 + i % 9) for i in range(40)]
    with engine(small_model, overlap, max_num_seqs=4) as llm:
        running, sizes = [], []
        launch = llm.runner.launch

        def spy(batch: Any) -> Any:
            running.append(llm.stats()["num_running"])
            sizes.append(len(batch.seqs))
            return launch(batch)

        llm.runner.launch = spy
        outputs = run(llm, prompts, params)
        assert max(running) == max(sizes) == 4
        assert ids_of(outputs) == ids_of(run(small, prompts, params))
        assert_empty(llm)


@pytest.mark.parametrize("budget", [1, 5, 64])
def test_max_num_batched_tokens_is_never_exceeded(small_model: str, small: LLM, budget: int) -> None:
    prompts = random_prompts(6)
    with engine(small_model, max_num_batched_tokens=budget) as llm:
        sizes: list[int] = []
        launch = llm.runner.launch

        def spy(batch: Any) -> Any:
            if batch.is_prefill:
                sizes.append(sum(seq.num_scheduled_tokens for seq in batch.seqs))
            return launch(batch)

        llm.runner.launch = spy
        assert ids_of(run(llm, prompts)) == ids_of(run(small, prompts))
        assert max(sizes) <= budget


# Seeds


def sampled(seed: int | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True, seed=seed, **fields)


@BOTH
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(
    small_model: str, small: LLM, overlap: bool
) -> None:
    prompts = random_prompts(16, 20)
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), *range(100, 109)]
    params = [sampled(seed) for seed in seeds]
    batch = ids_of(run(small, prompts, params))
    for i in (0, 3, 7, 15):
        assert ids_of(run(small, [prompts[i]], params[i])) == [batch[i]]
    with engine(small_model, overlap, num_kvcache_blocks=8, max_num_batched_tokens=13, seed=5) as llm:
        llm.scheduler._growth_fits = lambda *_: True  # no watermark
        assert ids_of(run(llm, prompts, params)) == batch
        assert llm.stats()["preemptions"] > 5
        assert_empty(llm)


def test_different_seeds_give_different_tokens(small: LLM) -> None:
    outputs = ids_of(run(small, [[5, 6]] * 20, [sampled(seed) for seed in range(20)]))
    assert len(set(map(tuple, outputs))) == 20
    assert len({ids[0] for ids in outputs}) > 3


def test_what_may_take_longest_starts_first_with_the_seeds_of_the_order_given(small_model: str) -> None:
    prompts, lengths = random_prompts(5), [3, 9, 5, 9, None]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    with engine(small_model, max_model_len=128, max_num_seqs=1) as llm:
        added = [llm.sequences[llm.add_request(ids, p)] for ids, p in zip(prompts, params)]
        ended = [output["prompt_token_ids"] for _ in iter(llm.is_finished, True) for output in llm.step()]
    assert ended == [prompts[i] for i in (4, 1, 3, 2, 0)]
    with engine(small_model, max_model_len=128) as llm:
        outputs = run(llm, prompts, params)
    assert [output["token_ids"] for output in outputs] == [seq.completion_token_ids for seq in added]


def test_requests_without_a_seed_differ_and_a_new_engine_repeats_them(small_model: str) -> None:
    answers = []
    for seed in (0, 0, 1):
        with engine(small_model, seed=seed) as llm:
            calls = [run(llm, [[5, 6]] * 5, sampled()) for _ in range(2)]
            answers.append([tuple(output["token_ids"]) for outputs in calls for output in outputs])
    assert len(set(answers[0])) == 10
    assert answers[0] == answers[1]
    assert not set(answers[0]) & set(answers[2])


def test_greedy_rows_are_not_disturbed_by_sampled_ones(small: LLM) -> None:
    prompts = random_prompts(6)
    expected = ids_of(run(small, prompts, greedy(20)))
    mixed = run(small, prompts, [greedy(20) if i % 2 else sampled(1) for i in range(6)])
    assert ids_of(mixed)[1::2] == expected[1::2]


# Interruptions


@BOTH
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("runner.launch", 0), ("runner.launch", 1), ("runner.launch", 9), ("scheduler.schedule", 5),
        ("scheduler.postprocess", 0), ("scheduler.postprocess", 7), ("_step", 0), ("_step", 6), ("_output", 0),
        ("_output", 2), ("_add", 0), ("scheduler.add", 3), ("scheduler._preempt", 2),
    ],
)  # fmt: skip
def test_an_interrupted_generate_leaves_nothing_behind(
    small_model: str, small: LLM, monkeypatch: pytest.MonkeyPatch, where: str, after: int, error: Any, overlap: bool
) -> None:
    prompts, mine = random_prompts(12, 20), random_prompts(5, 20, seed=1)
    params = [greedy(10 + 3 * i) for i in range(12)]
    with engine(small_model, overlap, num_kvcache_blocks=8, max_num_batched_tokens=32) as llm:
        monkeypatch.setattr(llm.scheduler, "_growth_fits", lambda *_: True)
        *path, name = where.split(".")
        owner = getattr(llm, path[0]) if path else llm
        original, calls = getattr(owner, name), iter(range(after))

        def interrupted(*args: Any) -> Any:
            if next(calls, None) is None:
                raise error("interrupted")
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(error, match="interrupted"):
                run(llm, prompts, params)
        assert_empty(llm)
        outputs = run(llm, mine + prompts)
        assert [output["prompt_token_ids"] for output in outputs] == mine + prompts
        assert ids_of(outputs) == ids_of(run(small, mine + prompts))
        assert_empty(llm)


def test_blocks_of_a_step_that_failed_are_never_taken_for_a_prefix(small_model: str, small: LLM) -> None:
    prompt = random_prompts(1, seed=9)[0] * 8
    with engine(small_model) as llm:
        launch = llm.runner.launch

        def fail(batch: Any) -> Any:
            raise RuntimeError("device lost")

        llm.runner.launch = fail
        with pytest.raises(RuntimeError, match="device lost"):
            run(llm, [prompt])
        llm.runner.launch = launch
        (output,) = run(llm, [prompt])
        assert output["num_cached_tokens"] == 0
        assert output["token_ids"] == run(small, [prompt])[0]["token_ids"]


# The engine below


@BOTH
def test_an_error_in_step_leaves_nothing_behind(small_model: str, overlap: bool) -> None:
    with engine(small_model, overlap) as llm:
        launch = llm.runner.launch
        for failing in (0, 3):
            for prompt in random_prompts(5):
                llm.add_request(prompt, greedy(12))
            for _ in range(failing):
                llm.step()
            llm.runner.launch = lambda batch: 1 / 0
            with pytest.raises(ZeroDivisionError):
                llm.step()
            llm.runner.launch = launch
            assert_empty(llm)
            assert llm.step() == []


def collect(llm: LLM) -> dict[int, dict[str, Any]]:
    outputs: dict[int, dict[str, Any]] = {}
    while not llm.is_finished():
        for output in llm.step():
            assert output["seq_id"] not in outputs
            outputs[output["seq_id"]] = output
    return outputs


@BOTH
def test_requests_can_be_added_between_steps(small_model: str, small: LLM, overlap: bool) -> None:
    prompts = random_prompts(12)
    with engine(small_model, overlap) as llm:
        assert llm.is_finished()
        assert llm.step() == []
        outputs: dict[int, dict[str, Any]] = {}
        ids = []
        for prompt in prompts:
            ids.append(llm.add_request(prompt, greedy(12)))
            assert not llm.is_finished()
            outputs.update((output["seq_id"], output) for output in llm.step() + llm.step())
        outputs.update(collect(llm))
        assert [outputs[i]["token_ids"] for i in ids] == ids_of(run(small, prompts, greedy(12)))
        assert_empty(llm)


@BOTH
def test_generate_answers_only_its_own_and_step_the_added_ones(small_model: str, small: LLM, overlap: bool) -> None:
    mine, added = random_prompts(4), random_prompts(5, seed=2)
    lengths = (1, 3, 8, 30, 60)  # some end during `generate`, some after it
    with engine(small_model, overlap) as llm:
        ids = [llm.add_request(prompt, greedy(n)) for prompt, n in zip(added, lengths)]
        outputs = run(llm, mine, greedy(20))
        assert ids_of(outputs) == ids_of(run(small, mine, greedy(20)))
        assert not llm.is_finished()
        rest = collect(llm)
        assert set(rest) == set(ids)
        expected = run(small, added, [greedy(n) for n in lengths])
        assert [rest[i]["token_ids"] for i in ids] == ids_of(expected)
        assert_empty(llm)


@BOTH
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_request_is_never_answered_and_the_others_are(
    small_model: str, small: LLM, steps: int, overlap: bool
) -> None:
    prompts = random_prompts(6)
    with engine(small_model, overlap, max_num_seqs=4) as llm:
        ids = [llm.add_request(prompt, greedy(12)) for prompt in prompts]
        for _ in range(steps):
            llm.step()
        for i in (1, 5):  # 5 still waits
            llm.abort(ids[i])
            llm.abort(ids[i])
        outputs = collect(llm)
        assert set(outputs) == {ids[i] for i in (0, 2, 3, 4)}
        expected = ids_of(run(small, prompts, greedy(12)))
        assert [outputs[ids[i]]["token_ids"] for i in (0, 2, 3, 4)] == [expected[i] for i in (0, 2, 3, 4)]
        llm.abort(ids[0])  # finished
        llm.abort(10**9)  # unknown
        assert_empty(llm)


def test_all_requests_can_be_aborted(small_model: str) -> None:
    with engine(small_model, overlap=True) as llm:
        ids = [llm.add_request([5, 6], greedy(12)) for _ in range(3)]
        llm.step()
        for i in ids:
            llm.abort(i)
        assert llm.is_finished()
        assert llm.step() == []
        assert_empty(llm)
        assert len(run(llm, [[5, 6]])[0]["token_ids"]) == 8


@pytest.mark.parametrize("wrap", [lambda i: [i], str, lambda _: None])
def test_an_abort_of_anything_but_an_id_is_refused_and_ends_no_request(small: LLM, wrap: Any) -> None:
    seq_id = small.add_request([5, 6], greedy(3))
    with pytest.raises(ValueError, match="seq_id"):
        small.abort(wrap(seq_id))
    assert list(collect(small)) == [seq_id]


@pytest.mark.parametrize("bad", [5, None, [], [True], [1000], b"x", {1: 2}, [[5]]])
def test_add_request_refuses_what_generate_refuses(small: LLM, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prompt"):
        small.add_request(bad)


@pytest.mark.parametrize("prompt", [np.array([5, 6]), torch.tensor([5, 6]), (5, 6), [np.int64(5), 6]])
def test_add_request_takes_what_generate_takes(small: LLM, prompt: Any) -> None:
    seq_id = small.add_request(prompt, greedy())
    assert collect(small)[seq_id]["token_ids"] == run(small, [[5, 6]])[0]["token_ids"]


def test_add_request_takes_a_string(tiny: LLM) -> None:
    seq_id = tiny.add_request("hello", greedy())
    assert collect(tiny)[seq_id]["text"] == run(tiny, "hello")[0]["text"]


@BOTH
def test_stats_count_what_happened_and_never_go_back(small_model: str, overlap: bool) -> None:
    prompts = random_prompts(10, 20)
    names = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions", "steps")
    with engine(small_model, overlap, num_kvcache_blocks=8) as llm:
        assert [llm.stats()[name] for name in names] == [0] * 5
        llm.scheduler._growth_fits = lambda *_: True
        for prompt in prompts:
            llm.add_request(prompt, greedy(40))
        assert llm.stats()["num_waiting"] == 10
        before, seen = llm.stats(), 0
        while not llm.is_finished():
            llm.step()
            now = llm.stats()
            assert all(before[name] <= now[name] for name in names)
            assert 0 <= now["num_free_blocks"] <= now["num_kvcache_blocks"] == 8
            seen += now["num_running"] > 0
            before = now
        assert seen
        assert before["generated_tokens"] == 400
        assert before["prompt_tokens"] == sum(map(len, prompts))
        assert before["preemptions"] > 0
        assert before["steps"] >= 40
        run(llm, [prompts[0] * 3, prompts[0] * 3])
        assert llm.stats()["prompt_tokens"] == before["prompt_tokens"] + 6 * len(prompts[0])


# Engines in turn and at once


def test_newcomers_before_every_step_do_not_stop_those_that_run(small: LLM) -> None:
    first = small.add_request([5, 6, 7], greedy(4))
    for steps in range(1, 200):
        small.add_request([9, steps % 90], greedy(1))
        if any(output["seq_id"] == first for output in small.step()):
            break
    assert 40 < steps < 60  # a decode after 16 prefills
    while not small.is_finished():
        small.step()


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs"])
def test_parameters_that_are_wrong_by_now_are_refused_by_name(small: LLM, field: str) -> None:
    params = SamplingParams()
    setattr(params, field, "5" * 1000)
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}='5{{499}}\.\.\.: must be"):
        small.add_request([5], params)


def test_exit_may_be_called_twice_and_a_closed_engine_says_so(small_model: str) -> None:
    llm = engine(small_model)
    run(llm, [[5]])
    llm.add_request([5], greedy(1))
    run(llm, [[5]])  # the one before ends, too, and nobody has asked for it
    llm.add_request([5])
    begun = llm.stream([5])
    llm.exit()
    llm.exit()
    late = (lambda: run(llm, [[5]]), lambda: llm.add_request([5]), lambda: llm.stream([5]), lambda: next(begun))
    for call in (*late, llm.step):
        with pytest.raises(EngineError, match="exit"):
            call()
    assert llm.is_finished()


def test_the_context_manager_closes_the_engine_also_after_an_error(small_model: str) -> None:
    with pytest.raises(ZeroDivisionError), engine(small_model) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineError):
        run(llm, [[5]])
    llm.exit()


def test_engines_in_turn_give_the_same_tokens(small_model: str, small: LLM) -> None:
    prompts = random_prompts(4)
    for _ in range(3):
        with engine(small_model) as llm:
            assert ids_of(run(llm, prompts)) == ids_of(run(small, prompts))


@BOTH
def test_engines_at_once_with_other_block_sizes_do_not_meet(small_model: str, small: LLM, overlap: bool) -> None:
    prompts = [*random_prompts(6), [7] * 300]
    expected = ids_of(run(small, prompts, greedy(40)))
    sizes = (16, 256, 48)
    engines = [engine(small_model, overlap, kvcache_block_size=n, num_kvcache_blocks=2000 // n) for n in sizes]
    for _ in range(2):
        for llm in engines:
            assert ids_of(run(llm, prompts, greedy(40))) == expected
    added = [[llm.add_request(prompt, greedy(40)) for prompt in prompts] for llm in engines]
    outputs: list[dict[int, dict[str, Any]]] = [{} for _ in engines]
    while not all(llm.is_finished() for llm in engines):  # step by step in turn
        for llm, found in zip(engines, outputs):
            found.update((output["seq_id"], output) for output in llm.step())
    for llm, ids, found in zip(engines, added, outputs):
        assert [found[i]["token_ids"] for i in ids] == expected
        assert_empty(llm)
        llm.exit()


def test_one_engine_ends_and_the_other_goes_on(small_model: str) -> None:
    first, second = engine(small_model), engine(small_model)
    expected = ids_of(run(first, [[5, 6]]))
    first.exit()
    assert ids_of(run(second, [[5, 6]])) == expected
    second.exit()


def run_python(code: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[1])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)


def test_importing_the_package_imports_no_heavy_library() -> None:
    heavy = "('torch', 'transformers', 'triton', 'tokenizers', 'safetensors')"
    done = run_python(f"import sys, nanovllm; print([m for m in {heavy} if m in sys.modules])")
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_script_that_never_calls_exit_ends_cleanly_and_needs_no_transformers_for_ids(small_model: str) -> None:
    done = run_python(
        "import sys; from nanovllm import LLM, SamplingParams as S\n"
        f"llm = LLM({small_model!r}, device='cpu', num_kvcache_blocks=4)\n"
        "out = llm.generate([[5, 6]], S(max_tokens=3, detokenize=False), use_tqdm=False)\n"
        "print(len(out[0]['token_ids']), 'transformers' in sys.modules)"
    )
    assert (done.stdout.strip(), done.returncode, done.stderr) == ("3 False", 0, "")


def test_the_progress_bar_shows_rates_and_can_be_silenced(small: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    small.generate([[5], [6]], greedy(), use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    small.generate([[5], [6]], greedy())
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "2/2" in printed.err
    assert "prefill" in printed.err and "decode" in printed.err and "tok/s" in printed.err


# Chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chat_completes_one_conversation_through_the_template(tiny: LLM) -> None:
    (output,) = tiny.chat([user("introduce yourself")], greedy(300, ignore_eos=False), use_tqdm=False)
    assert output["prompt_token_ids"] == PROMPT
    assert output["text"] == TEXT


def test_chat_completes_several_conversations_in_order(tiny: LLM) -> None:
    answers = GOLDEN[::40]
    conversations = [[user(answer["question"])] for answer in answers]
    outputs = tiny.chat(conversations, greedy(300, ignore_eos=False), use_tqdm=False)
    assert [output["text"] for output in outputs] == [answer["text"] for answer in answers]
    turns = [user("hello"), {"role": "assistant", "content": "Hi."}, user("introduce yourself")]
    (output,) = tiny.chat([turns], greedy(1), use_tqdm=False)
    prompt = tiny.tokenizer.decode(output["prompt_token_ids"])
    assert prompt.index("hello") < prompt.index("Hi.") < prompt.index("introduce yourself")


def test_chat_without_generation_prompt_ends_with_the_message(tiny: LLM) -> None:
    (output,) = tiny.chat([user("hello")], greedy(1), use_tqdm=False, add_generation_prompt=False)
    assert tiny.tokenizer.decode(output["prompt_token_ids"]) == "<|im_start|>user\nhello<|im_end|>\n"


def test_chat_passes_keywords_to_the_template(tiny_copy: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if not enable_thinking %}<think></think>{% endif %}"
    edit_json(tiny_copy / "tokenizer_config.json", chat_template=template)
    with engine(tiny_copy) as llm:
        prompts = [
            llm.chat([user("hello")], greedy(1), use_tqdm=False, chat_template_kwargs={"enable_thinking": thinking})
            for thinking in (True, False)
        ]
        texts = [llm.tokenizer.decode(output["prompt_token_ids"]) for (output,) in prompts]
    assert texts == ["hello", "hello<think></think>"]


@pytest.mark.parametrize("options", ["x", 3, ["a"], {"tokenize": True}])
def test_variables_of_the_template_that_are_none_are_refused(tiny: LLM, options: Any) -> None:
    with pytest.raises(TypeError, match=r"chat_template_kwargs=.*: must be a dict of variables of the template"):
        tiny.chat([user("hello")], chat_template_kwargs=options)


def test_a_prompt_that_is_too_long_gives_an_error_and_no_warning(tiny_copy: Path) -> None:
    script = f"""
from nanovllm import LLM
try:
    LLM({str(tiny_copy)!r}, device="cpu").generate("hello " * 5000)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "must be at most" in done.stdout and done.stderr == ""


def test_the_prompts_of_conversations_can_be_had_for_other_calls(tiny: LLM) -> None:
    conversations = [[user("hello")], [user("introduce yourself")]]
    prompts = tiny.chat_prompts(conversations)
    assert prompts[1] == PROMPT
    outputs = tiny.chat(conversations, greedy(1), use_tqdm=False)
    assert prompts == [output["prompt_token_ids"] for output in outputs]
    [shorter] = tiny.chat_prompts(conversations[:1], {"add_generation_prompt": False})
    assert tiny.tokenizer.decode(shorter) == "<|im_start|>user\nhello<|im_end|>\n"
    with pytest.raises(TypeError, match=r"conversation 1 is 'Hi': must be a list of role/content dicts"):
        tiny.chat_prompts([[user("hello")], "Hi"])  # type: ignore[list-item]


@pytest.mark.parametrize("content", [None, 5, [], [{"type": "text", "text": "hello"}], {}])
def test_content_that_a_template_would_not_take_as_it_is_is_refused(tiny: LLM, content: Any) -> None:
    with pytest.raises(TypeError, match=r"conversation 1 has content=.*: must be a string"):
        tiny.chat_prompts([[user("hello")], [user("hello"), user(content)]])
    with pytest.raises(TypeError, match="content=None"):
        tiny.chat([{"role": "user", "contents": "hello"}])


def test_a_message_that_only_calls_tools_needs_no_content(tiny: LLM) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    for message in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ):
        assert tiny.chat_prompts([[user("hello"), message]])


def test_chat_takes_parameters_for_each_conversation(tiny: LLM) -> None:
    outputs = tiny.chat([[user("hello")], [user("hello")]], [greedy(2), greedy(5)], use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [2, 5]


# Streams


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"stop": "scratch"}, {"stop": ["nowhere", "12 of them"]}, {"max_tokens": 9},
        {"min_tokens": 60, "stop": "a"}, {"stop": "scratch", "include_stop_str_in_output": True},
    ],
)  # fmt: skip
def test_the_pieces_of_a_stream_make_up_the_output_of_generate(
    tiny_model: str, fields: dict[str, Any], overlap: bool
) -> None:
    params = greedy(**{"max_tokens": 300, "ignore_eos": False, **fields})
    with engine(tiny_model, overlap) as llm:
        (whole,) = run(llm, [PROMPT], params)
        pieces = list(llm.stream(PROMPT, params))
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == whole["finish_reason"]
        assert pieces[-1]["stop_reason"] == whole["stop_reason"]
        assert len(pieces) > 5
        assert sum(bool(piece["text"]) for piece in pieces) > 3
        assert_empty(llm)


def test_a_stream_holds_back_half_characters_and_the_beginning_of_a_stop_string(tiny_model: str) -> None:
    with engine(tiny_model) as llm:
        text = "ok 你好 🙂 done. STO, STOP here"
        ids = llm.tokenizer.encode(text)
        say(llm, ids)
        shown = ""
        for piece in llm.stream([50], greedy(len(ids), stop="STOP")):
            shown += piece["text"]
            assert "\ufffd" not in piece["text"]
            assert text[: text.index("STOP")].startswith(shown)
        assert shown == text[: text.index("STOP")]
        assert piece["stop_reason"] == "STOP"


def test_a_stream_that_ends_in_half_a_character_gives_what_generate_gives(tiny_model: str) -> None:
    with engine(tiny_model) as llm:
        ids = llm.tokenizer.encode("ok 🙂")
        say(llm, ids)
        (whole,) = run(llm, [[50]], greedy(len(ids) - 1))
        assert "".join(piece["text"] for piece in llm.stream([50], greedy(len(ids) - 1))) == whole["text"]


@BOTH
def test_leaving_a_stream_early_aborts_the_request(tiny_model: str, overlap: bool) -> None:
    with engine(tiny_model, overlap) as llm:
        for n, _ in enumerate(llm.stream(PROMPT, greedy(100))):
            if n == 3:
                break
        assert_empty(llm)
        stream = llm.stream(PROMPT, greedy(100))
        next(stream)
        stream.close()
        assert_empty(llm)
        assert run(llm, [PROMPT], greedy(300, ignore_eos=False))[0]["text"] == TEXT


def test_an_error_in_the_body_of_the_loop_aborts_the_request(tiny: LLM) -> None:
    stream = tiny.stream(PROMPT, greedy(100))
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            stream.throw(KeyboardInterrupt)
    assert_empty(tiny)


@BOTH
def test_streams_and_generate_can_run_at_once(tiny_model: str, overlap: bool) -> None:
    params = greedy(300, ignore_eos=False)
    with engine(tiny_model, overlap) as llm:
        first, second = llm.stream(PROMPT, params), llm.stream(GOLDEN[40]["prompt_token_ids"], params)
        texts = ["", ""]
        for _ in range(4):
            texts[0] += next(first)["text"]
            texts[1] += next(second)["text"]
        (output,) = run(llm, [GOLDEN[80]["prompt_token_ids"]], params)
        assert output["text"] == GOLDEN[80]["text"]
        texts[1] += "".join(piece["text"] for piece in second)
        texts[0] += "".join(piece["text"] for piece in first)
        assert texts == [TEXT, GOLDEN[40]["text"]]
        assert llm.is_finished(), "the output of a stream is not given out a second time"
        assert_empty(llm)


@BOTH
def test_step_streams_many_requests_while_others_join_and_leave(tiny_model: str, overlap: bool) -> None:
    included = {"stop": "e", "include_stop_str_in_output": True}
    fields = ({}, {"stop": "a"}, included, {"max_tokens": 9}, {"min_tokens": 40})
    prompts = [answer["prompt_token_ids"] for answer in GOLDEN[::12]]
    params = [greedy(**{"max_tokens": 60, "ignore_eos": False, **fields[i % 5]}) for i in range(len(prompts))]
    with engine(tiny_model, overlap, max_num_seqs=4) as llm:
        expected = run(llm, prompts, params)
        todo, ids, pieces = list(zip(prompts, params)), [], {}
        while todo or not llm.is_finished():
            if todo:
                ids.append(llm.add_request(*todo.pop(0)))
                pieces[ids[-1]] = []
            for piece in llm.step(stream=True):
                pieces[piece["seq_id"]].append(piece)
                if piece["seq_id"] == ids[0] and len(pieces[ids[0]]) == 3:
                    llm.abort(ids[0])
        assert len(pieces.pop(ids[0])) == 3
        for seq_id, whole in zip(ids[1:], expected[1:]):
            *first, last = pieces[seq_id]
            assert "".join(piece["text"] for piece in (*first, last)) == whole["text"]
            assert [i for piece in (*first, last) for i in piece["token_ids"]] == whole["token_ids"]
            assert all(piece["finish_reason"] is None and piece["token_ids"] for piece in first)
            other = ("seq_id", "text", "token_ids", "num_cached_tokens")
            assert {**last, **{key: whole[key] for key in other}} == whole
        assert_empty(llm)


def test_step_leaves_the_request_of_a_stream_to_the_stream(tiny: LLM) -> None:
    stream = tiny.stream(PROMPT, greedy(300, ignore_eos=False))
    text = next(stream)["text"]
    seq_id = tiny.add_request(PROMPT, greedy(4))
    for _ in range(300):
        assert {piece["seq_id"] for piece in tiny.step(stream=True)} <= {seq_id}
    assert text + "".join(piece["text"] for piece in stream) == TEXT


def test_step_does_not_return_a_stream_that_is_closed_meanwhile(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tiny.stream(PROMPT, greedy(2))
    next(stream)
    run(tiny, [PROMPT], greedy(4))  # meets the end of the stream, too
    assert len(tiny.unclaimed) == 1
    step = tiny._step
    monkeypatch.setattr(tiny, "_step", lambda: (stream.close(), step())[1])  # as a signal handler may
    assert tiny.step() == [] and tiny.is_finished()


def test_a_stream_without_detokenization_has_no_text_although_stop_strings_are_found(tiny: LLM) -> None:
    pieces = list(tiny.stream(PROMPT, greedy(300, detokenize=False, stop="scratch")))
    assert {piece["text"] for piece in pieces} == {""} and pieces[-1]["stop_reason"] == "scratch"


@pytest.mark.parametrize("bad", [[], [True], [10**9], "", None, [[5], [6]]])
def test_a_bad_prompt_of_a_stream_is_refused_at_once(tiny: LLM, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tiny.stream(bad)
    assert_empty(tiny)


def test_a_stream_that_is_never_started_costs_nothing(tiny: LLM) -> None:
    stream = tiny.stream(PROMPT)
    assert_empty(tiny)
    del stream


def test_a_stream_without_text_gives_ids(small: LLM) -> None:
    pieces = list(small.stream([5, 6], greedy(8)))
    assert [i for piece in pieces for i in piece["token_ids"]] == run(small, [[5, 6]])[0]["token_ids"]
    assert {piece["text"] for piece in pieces} == {""}


def test_a_stream_of_a_string_is_that_of_its_ids(tiny: LLM) -> None:
    pieces = list(tiny.stream("hello", greedy(8)))
    assert "".join(piece["text"] for piece in pieces) == run(tiny, "hello")[0]["text"]


def test_generate_returns_when_its_requests_are_aborted_from_outside(random_model):
    with LLM(random_model) as llm:
        step = llm._step
        calls = []

        def interrupted():
            calls.append(1)
            if len(calls) == 3:
                for seq_id in list(llm.sequences):
                    llm.abort(seq_id)
            return step()

        llm._step = interrupted
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        outputs = llm.generate([[5, 6], [7]], params, use_tqdm=False)
        assert [output["finish_reason"] for output in outputs] == ["abort", "abort"]
        assert all(0 < len(output["token_ids"]) < 50 for output in outputs)


@pytest.mark.parametrize("temperature", [1e-44, 1e-39, 1e-6])
def test_a_temperature_that_would_overflow_the_logits_is_greedy(random_model, temperature):
    with LLM(random_model) as llm:
        tiny, greedy = (
            llm.generate([[5, 6]], SamplingParams(temperature=t, seed=1), use_tqdm=False)[0]["token_ids"]
            for t in (temperature, 0)
        )
        assert tiny == greedy
