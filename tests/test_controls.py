"""Sampling controls: exact distributions, parity with transformers, and that each request gets what it gets alone."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import controls
from nanovllm.engine.controls import Controls, _plan_rows, _Rows, plan_controls
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import Slots
from nanovllm.kernels.sampling import sample
from nanovllm.kernels.truncation import truncate_reference, truncate_triton
from nanovllm.utils.parallel import Parallel

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V = 60
PROMPT, OUTPUT = [3, 5, 7, 7, 40], [9, 5, 9, 11, 9, 12]
CONTROLS: list[dict[str, Any]] = [
    {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.7}, {"presence_penalty": 1.2},
    {"frequency_penalty": 0.6}, {"logit_bias": {2: 1.5, 9: -2.0, 30: 100.0, 31: 99.0}},
    {"allowed_token_ids": [1, 9, 20, 20, 33, 59]}, {"bad_words": [[4], [8], [12, 6], [9, 12, 50], [5, 12, 20], [9, 3]]},
    {"top_k": 20, "top_p": 0.9}, {"top_p": 0.7, "min_p": 0.02, "temperature": 1.8},
    {"top_k": 9, "repetition_penalty": 0.6, "frequency_penalty": -0.4, "presence_penalty": 0.5},
    {"allowed_token_ids": list(range(30)), "logit_bias": {5: 2.0}, "top_p": 0.95, "bad_words": [[12, 5], [0]]},
    {"top_k": 12, "top_p": 0.97, "min_p": 0.01, "presence_penalty": -1.0, "temperature": 0.5, "bad_words": [[3]]},
]  # fmt: skip


def sequence(fields: dict[str, Any], ids: list[int] = PROMPT + OUTPUT, num_prompt: int = len(PROMPT)) -> Sequence:
    """As the engine makes it; here bad_words are ids, there is no tokenizer."""
    seq = Sequence(ids, SamplingParams(**{k: v for k, v in fields.items() if k != "bad_words"}))
    seq.num_prompt_tokens, seq.bad_words = num_prompt, fields.get("bad_words", [])
    seq.slot, seq.has_controls = 0, True
    return seq


def changed(logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """logits [V] with the controls of `seq`."""
    history = torch.tensor([seq.token_ids + [-5] * 3], dtype=torch.int32, device=DEVICE)
    history[0, len(seq) :] = 0  # whatever lies there
    lens, t = torch.tensor([len(seq)], device=DEVICE), torch.tensor([seq.temperature], device=DEVICE)
    return _Rows(*_plan_rows([0], [seq]), DEVICE).change(logits[None].to(DEVICE).clone(), history, lens, t)[0]


def exact(logits: list[float], fields: dict[str, Any]) -> torch.Tensor:
    """Probabilities by the definitions, one id after the other."""
    defaults = {name: getattr(SamplingParams(), name) for name in SamplingParams.__slots__}
    p = {**defaults, "logit_bias": {}, "allowed_token_ids": range(V), "bad_words": [], **fields}
    x = [v + p["logit_bias"].get(i, 0.0) if i in p["allowed_token_ids"] else -math.inf for i, v in enumerate(logits)]
    for *prefix, last in p["bad_words"]:
        if (PROMPT + OUTPUT)[len(PROMPT + OUTPUT) - len(prefix) :] == prefix:
            x[last] = -math.inf
    for i in range(V):
        if i in PROMPT + OUTPUT:
            x[i] = x[i] / p["repetition_penalty"] if x[i] > 0 else x[i] * p["repetition_penalty"]
        x[i] -= OUTPUT.count(i) * p["frequency_penalty"] + (i in OUTPUT) * p["presence_penalty"]
    w = [math.exp((v - max(x)) / p["temperature"]) for v in x]
    order = sorted(range(V), key=lambda i: (-x[i], i))
    order = [i for i in order if w[i] >= p["min_p"]][: p["top_k"] or V]
    total, mass, out = sum(w[i] for i in order), 0.0, torch.zeros(V, dtype=torch.float64)
    for i in order:
        if mass < p["top_p"] * total:
            out[i] = w[i]
        mass += w[i]
    return out / out.sum()


@pytest.mark.parametrize("truncate", [truncate_reference, truncate_triton])
@pytest.mark.parametrize("fields", CONTROLS, ids=lambda fields: "-".join(fields))
def test_draws_follow_the_exact_distribution(fields: dict[str, Any], truncate: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(controls, "truncate", lambda x, t, k, p, m: truncate(x, t, k, p, t * m.log()))
    n = 200_000 if truncate is truncate_reference or DEVICE.type == "cuda" else 20_000
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    seq = sequence(fields)
    row = changed(logits, seq)
    t, seed = (torch.full((n,), v, device=DEVICE) for v in (seq.temperature, 77))
    parts = zip(t.split(10_000), seed.split(10_000), torch.arange(n, device=DEVICE).split(10_000))
    ids = torch.cat([sample(row.expand(len(part[0]), -1), *part) for part in parts])
    counts = ids.bincount(minlength=V).cpu()
    p = exact(logits.tolist(), fields)
    assert counts[p == 0].sum() == 0
    expected = n * p[p > 0]
    chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(len(expected) - 1, 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, chi2 / 2) > 0.001


def test_processors_of_transformers_give_the_same_logits() -> None:
    from transformers.generation import logits_process as hf

    g = torch.Generator().manual_seed(3)
    for case in range(40):
        logits = torch.randn(V, generator=g) * 3
        # not 2: transformers up to 5.17 overlooks a word whose prefix is all of the history
        ids = torch.randint(0, V, (1, 3 + case % 20), generator=g)
        history = ids[0].tolist()
        words = [[1], [history[-1], 2], [*history[-2:], 30], [history[-2], 31], [(history[-1] + 1) % V, 32]]
        words.append([history[0], *history, 33])  # longer than what is there
        bias = {3: 0.1 * case, 7: -1.3}
        pairs: list[tuple[dict[str, Any], Any]] = [
            ({"repetition_penalty": 0.5 + case / 20}, hf.RepetitionPenaltyLogitsProcessor(0.5 + case / 20)),
            ({"bad_words": words}, hf.NoBadWordsLogitsProcessor(words)),
            ({"logit_bias": bias}, hf.SequenceBiasLogitsProcessor({(i,): value for i, value in bias.items()})),
            ({"top_k": 1 + case}, hf.TopKLogitsWarper(1 + case)),
            ({"top_p": 0.02 + case / 42}, hf.TopPLogitsWarper(0.02 + case / 42)),
            ({"min_p": case / 40}, hf.MinPLogitsWarper(case / 40)),
        ]
        for fields, processor in pairs:
            ours = changed(logits, sequence(fields, history, num_prompt=1)).cpu()
            theirs = processor(ids, logits[None].clone())[0]
            assert torch.equal(ours.isinf(), theirs.isinf()), fields
            # a GPU may round another way than the CPU, on which transformers runs here
            largest = (ours / theirs - 1).nan_to_num().abs().max()
            assert largest <= (0 if DEVICE.type == "cpu" else 2e-7), (fields, largest)


def test_logits_of_the_step_and_of_rows_without_controls_stay_as_they_are() -> None:
    slots = Slots(4, 4, DEVICE)
    both = Controls(slots, Parallel(), V, 50)
    seqs = [Sequence([1, 2]), sequence(CONTROLS[3]), Sequence([3]), sequence({"top_k": 1})]
    seqs[3].slot = 2
    slots.context_lens[:3] = len(PROMPT + OUTPUT)
    logits, ids = torch.randn(4, V, device=DEVICE), torch.full((4,), -1, device=DEVICE)
    before = logits.clone()
    for seq in seqs:
        seq.num_cached_tokens = len(seq)
    both.load(plan_controls(seqs, prefill=True))
    both.resample(logits, ids, [len(seq) for seq in seqs])
    assert torch.equal(logits, before)
    assert ids[[0, 2]].tolist() == [-1, -1] and ids[3] == logits[3].argmax()
    assert slots.last_tokens[[0, 2]].tolist() == ids[[1, 3]].tolist()
    assert both.history[0, : len(PROMPT + OUTPUT) + 1].tolist() == [*PROMPT, *OUTPUT, ids[1]]


def test_a_rehearsal_truncates_and_samples_such_tensors_as_a_step_does(monkeypatch: Any) -> None:
    calls: list[Any] = []

    def watch(name: str, kernel: Any) -> None:
        def call(x: torch.Tensor, *args: torch.Tensor) -> Any:
            calls.append((name, x.stride(), *(v.dtype for v in (x, *args))))
            return kernel(x, *args)

        monkeypatch.setattr(controls, name, call)

    watch("truncate", controls.truncate)
    watch("sample", controls.sample)
    rows = Controls(Slots(4, 4, DEVICE), Parallel(), V, 50)
    rows.rehearse(torch.bfloat16)
    seqs = [sequence({"top_k": 3}), sequence({"top_p": 0.5, "presence_penalty": 1.0})]
    rows.load(plan_controls(seqs, prefill=True))
    logits, ids = torch.randn(2, V, device=DEVICE).bfloat16(), torch.zeros(2, device=DEVICE).long()
    rows.resample(logits, ids, [len(seq) for seq in seqs])
    assert len(calls) == 8 and calls[:4] == calls[4:] and calls[:2] != calls[2:4]


def test_the_memory_of_controls_includes_what_truncation_collects(monkeypatch: Any) -> None:
    """Which is more than the logits if the vocabulary is small."""
    sizes: list[int] = []
    new_empty = torch.Tensor.new_empty

    def record(x: torch.Tensor, *size: int, **options: Any) -> torch.Tensor:
        sizes.append(math.prod(size) * x.element_size())
        return new_empty(x, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", record)
    off = torch.zeros(128, device=DEVICE)
    truncate_triton(torch.zeros(128, V, device=DEVICE), off, off.int(), off, off)
    assert sum(sizes) + 128 * V * (2 + 4) <= Controls(Slots(128, 4, DEVICE), Parallel(), V, 50).num_bytes


@pytest.mark.parametrize("truncate", [truncate_reference, truncate_triton])
def test_a_top_p_that_fp32_cannot_hold_leaves_the_best_token(truncate: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(controls, "truncate", lambda x, t, k, p, m: truncate(x, t, k, p, t * m.log()))
    row = changed(torch.tensor([1.0, 3.0, 3.0, *[0.0] * (V - 3)]), sequence({"top_p": 1e-46}))
    assert row.isfinite().nonzero().tolist() == [[1]]


def test_numbers_are_added_in_full_precision_to_logits_of_half() -> None:
    logits = torch.randn(V, dtype=torch.bfloat16) * 20
    row = changed(logits, sequence({"logit_bias": {3: 0.01}, "frequency_penalty": 0.01}))
    assert row[3].item() == logits[3].float() + 0.01 and row[9].item() == logits[9].float() - 0.03


def test_ranks_with_shares_of_the_vocabulary_draw_what_one_rank_draws() -> None:
    picked = [fields for fields in CONTROLS if sequence(fields).params.adjusts_logits]  # one group
    logits = torch.randn(len(picked), V + 1, device=DEVICE)[:, :V]
    shares = logits.split(8, 1)  # of 8 ranks: the last has half of one

    class Ranks(Parallel):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.equal(x[:, : shares[self.rank].shape[1]], shares[self.rank]) and x.shape[1] == 8
            return torch.stack(
                [torch.nn.functional.pad(share, (0, 8 - share.shape[1]), value=50.0) for share in shares]
            )

    results = []
    for parallel, share in ((Parallel(), logits), (Ranks(1, 8), shares[1]), (Ranks(7, 8), shares[7])):
        slots, ids = Slots(len(picked), 4, DEVICE), torch.zeros(len(picked), dtype=torch.int64, device=DEVICE)
        slots.temperatures += 1.0
        slots.context_lens += len(PROMPT + OUTPUT)
        seqs = [sequence(fields) for fields in picked]
        for i, seq in enumerate(seqs):
            seq.slot, seq.num_cached_tokens, seq.seed = i, len(seq), i
        rows = Controls(slots, parallel, V, 50)
        rows.load(plan_controls(seqs, prefill=True))
        rows.resample(share, ids, [len(seq) for seq in seqs])
        results.append(ids.tolist())
    assert results[0] == results[1] == results[2] and len(set(results[0])) > 2


# In the engine


MIXED: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.5}, {},
    {"frequency_penalty": -0.7}, {"logit_bias": {300: 8.0, 5: -3.0}}, {"allowed_token_ids": list(range(100, 160))},
    {"bad_words": ["the", "ing", "a robot"]}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    {"min_p": 0.02, "top_k": 50, "frequency_penalty": 0.5, "bad_words": ["e", "o u"]}, {"temperature": 0},
    {"temperature": 0, "presence_penalty": 2.0, "min_tokens": 9, "stop_token_ids": list(range(2, 300))},
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {40: 5}}, {"top_p": 0.9, "min_tokens": 5, "stop": "e"},
]  # fmt: skip


def engine(folder: str, overlap: bool, **options: Any) -> LLM:
    llm = LLM(folder, **{"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 600, **options})
    llm.overlap = overlap
    return llm


def run(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def mixed(tiny_model: str) -> Iterator[tuple[Any, Any, Any]]:
    """64 prompts, a setting for each, and what each gets alone."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 1000) for _ in range(rng.randint(1, 40))] for _ in range(64)]
    params = [
        SamplingParams(**{"temperature": 0.9, "max_tokens": 24, "ignore_eos": True, "seed": i, **MIXED[i % len(MIXED)]})
        for i in range(64)
    ]
    with engine(tiny_model, False) as llm:
        yield prompts, params, [run(llm, [p], q)[0] for p, q in zip(prompts, params)]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 20, "max_num_batched_tokens": 29}], ids=["", "small"])
def test_each_request_of_a_mixed_batch_gets_what_it_gets_alone(
    tiny_model: str, mixed: Any, options: dict[str, int], overlap: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(controls, "MAX_ROWS", 7)
    prompts, params, alone = mixed
    with engine(tiny_model, overlap, **options) as llm:
        llm.scheduler._growth_fits = lambda *_: True  # no watermark
        assert run(llm, prompts, params) == alone
        assert (llm.stats()["preemptions"] > 10) == bool(options)
        if not options:  # slots and history that others have used
            assert run(llm, prompts[::-1], params[::-1]) == alone[::-1]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_penalties_and_bans_count_every_token_so_far(tiny_model: str, overlap: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = [20, 30, 40, 20]
    with engine(tiny_model, overlap) as llm:
        free = llm.tokenizer.decode(run(llm, [prompt], SamplingParams(temperature=0, ignore_eos=True))[0])
        word = free[len(free) // 2 :][:6]
        settings: list[tuple[float, float, float, list[str]]] = [
            (1.4, 0, 0, []), (1, 1.5, 0, []), (1, 0, 0.9, []), (0.8, -1, 0.7, [word]), (1, 0, 0, [word]),
        ]  # fmt: skip
        params = [
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=r, presence_penalty=p,
                           frequency_penalty=f, bad_words=w) for r, p, f, w in settings
        ]  # fmt: skip
        answers = run(llm, [prompt] * len(params), params)
        words = [ids for w in (word, " " + word.lstrip()) if (ids := llm.tokenizer.encode(w))]
    assert max(map(len, words)) > 1
    for (repetition, presence, frequency, bad), answer in zip(settings, answers):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].tolist()
        for n, (x, token_id) in enumerate(zip(logits, answer)):
            output, ids = answer[:n], prompt + answer[:n]
            for w in words if bad else ():
                if ids[len(ids) - len(w) + 1 :] == w[:-1]:
                    x[w[-1]] = -math.inf
            for i in set(ids):
                x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
                x[i] -= frequency * output.count(i) + presence * (i in output)
            assert token_id == max(range(len(x)), key=x.__getitem__)
    assert len(set(map(tuple, answers))) == len(answers)


def test_bad_words_are_not_in_the_text(tiny_model: str) -> None:
    params = [SamplingParams(temperature=t, max_tokens=80, bad_words=["robot", "I am"], seed=3) for t in (0, 1.0, 1.5)]
    with engine(tiny_model, True) as llm:
        plain = llm.generate("introduce yourself", SamplingParams(temperature=0, max_tokens=80), use_tqdm=False)
        outputs = llm.generate(["introduce yourself"] * 3, params, use_tqdm=False)
    texts = [output["text"] for output in outputs]
    assert all("robot" not in text and "I am" not in text for text in texts), (plain[0]["text"], texts)


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(tiny_model: str) -> None:
    with engine(tiny_model, False) as llm:
        seq = llm._make_sequence([5], SamplingParams(bad_words=["robot", " hello"]))
        texts = ["robot", " robot", " hello", " hello"]
        assert seq.bad_words == [llm.tokenizer.encode(text) for text in texts]
        assert seq.bad_words[0] != seq.bad_words[1]


def test_only_allowed_ids_are_drawn(tiny_model: str) -> None:
    with engine(tiny_model, True) as llm:
        (ids,) = run(llm, [[5, 6]], SamplingParams(temperature=5.0, allowed_token_ids=[7, 100, 101], ignore_eos=True))
    assert set(ids) == {7, 100, 101}


@pytest.mark.parametrize("field", [{"logit_bias": {1000: 1.0}}, {"allowed_token_ids": [3, 1000]}])
def test_ids_outside_of_the_vocabulary_are_refused(random_model: str, field: dict[str, Any]) -> None:
    match = rf"prompt 1: {next(iter(field))}.*0\.\.999"
    with engine(random_model, False) as llm, pytest.raises(ValueError, match=match):
        run(llm, [[5], [6]], [SamplingParams(), SamplingParams(**field)])


def test_parameters_that_the_caller_changes_later_do_not_change_a_request(random_model: str) -> None:
    with engine(random_model, True) as llm:
        params = SamplingParams(temperature=2.0, top_k=1, max_tokens=9, ignore_eos=True)
        llm.add_request([5, 6], params)
        params.top_k, params.presence_penalty = 0, 2.0
        outputs: list[Any] = []
        while not llm.is_finished():
            outputs += llm.step()
        (greedy,) = run(llm, [[5, 6]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert outputs[0]["token_ids"] == greedy
