"""Qwen3 against transformers' own model: the same greedy tokens and logits in fp32, however the steps are cut."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save_random_qwen3

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import linear
from nanovllm.layers.embedding import VocabParallelEmbedding
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.utils.parallel import Parallel

TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5
EOS = 1
# name: fields of the config; the groups are of 1, 2, 4 and 7 heads
SHAPES: dict[str, dict[str, Any]] = {
    "group1-dim32-tied": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True,
    },
    "group2-dim64-bias-3kv": {
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "attention_bias": True,
    },
    "group4-dim128": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "group7-dim32-tied-bias": {
        "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
        "attention_bias": True,
    },
}  # fmt: skip
# Rounding moves an fp32 logit of these models by about 1e-5, so no such margin can flip.
SAFE_MARGIN = 1e-4
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 65, 90, 117, 128, 129, 150, 177, 200, 223, 250, 255, 256, 257, 300)
NUM_TOKENS = 10


@dataclass
class Oracle:
    """What transformers says: prompts, its greedy tokens, and the logits they came from."""

    folder: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    def long(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts with a long answer that ends at the end-of-sequence id, if it occurs."""
        rows = [i for i, tokens in enumerate(self.tokens) if len(tokens) > NUM_TOKENS]
        ended = [t[: t.index(EOS) + 1] if EOS in t else t for t in (self.tokens[i] for i in rows)]
        return [self.prompts[i] for i in rows], ended

    def short(self) -> tuple[list[list[int]], list[list[int]]]:
        rows = [i for i, tokens in enumerate(self.tokens) if len(tokens) == NUM_TOKENS]
        return [self.prompts[i] for i in rows], [self.tokens[i] for i in rows]


@torch.inference_mode()
def ask_transformers(folder: str, groups: list[tuple[int, int, int]], seed: int = 0) -> Oracle:
    """groups: (length of the prompts, how many, tokens to generate); a batch has prompts of one length, no padding."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    rng = random.Random(seed)
    oracle = Oracle(folder, [], [], [])
    for length, n, num_tokens in groups:
        # a few to spare, because a prompt with two logits too close to tell apart is left out
        prompts = [[rng.randrange(2, model.config.vocab_size) for _ in range(length)] for _ in range(n + 4)]
        ids = torch.tensor(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits = torch.stack(out.logits, dim=1)
        best = logits.topk(2).values
        safe = ((best[..., 0] - best[..., 1]).amin(1) > SAFE_MARGIN).nonzero().flatten().tolist()[:n]
        assert len(safe) == n
        oracle.prompts += [prompts[i] for i in safe]
        oracle.tokens += out.sequences[safe, length:].tolist()
        oracle.logits += logits[safe].unbind()
    return oracle


@pytest.fixture(scope="module", params=list(SHAPES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """200 prompts of 1 to 300 ids, and 40 of 1 to 40 ids with long answers."""
    seed = list(SHAPES).index(request.param)
    fields = {"hidden_size": 64, "num_hidden_layers": 2, **SHAPES[request.param]}
    folder = save_random_qwen3(tmp_path_factory.mktemp(request.param), seed=seed, **fields)
    groups = [(length, 8, NUM_TOKENS) for length in LENGTHS] + [(length, 8, 50) for length in (1, 9, 16, 23, 40)]
    return ask_transformers(folder, groups, seed)


def greedy(max_tokens: int = NUM_TOKENS, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def engine(folder: str, overlap: bool = False, **options: Any) -> LLM:
    llm = LLM(folder, **{"device": "cpu", "num_kvcache_blocks": 512, "max_num_seqs": 256, **options})
    llm.overlap = overlap
    return llm


def test_the_oracle_is_not_trivial(oracle: Oracle) -> None:
    assert len(oracle.short()[0]) == 200
    assert len({token for tokens in oracle.tokens for token in tokens}) > 300
    assert sum(len(set(tokens)) > 5 for tokens in oracle.short()[1]) > 150


@pytest.mark.parametrize(("block_size", "overlap"), [(16, True), (256, False)])
def test_200_prompts_in_one_batch_give_the_tokens_of_transformers(
    oracle: Oracle, block_size: int, overlap: bool
) -> None:
    prompts, expected = oracle.short()
    num_blocks = 2 * 200 * 320 // block_size
    with engine(oracle.folder, overlap, kvcache_block_size=block_size, num_kvcache_blocks=num_blocks) as llm:
        assert tokens_of(llm.generate(prompts, greedy(), use_tqdm=False)) == expected
        assert llm.stats()["preemptions"] == 0
        assert llm.stats()["num_free_blocks"] == num_blocks


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_prompts_alone_give_the_tokens_of_transformers(oracle: Oracle, overlap: bool) -> None:
    prompts, expected = oracle.short()
    rows = slice(4 if overlap else 0, None, 8)  # one of each length
    with engine(oracle.folder, overlap, kvcache_block_size=16) as llm:
        for prompt, tokens in zip(prompts[rows], expected[rows]):
            (output,) = llm.generate([prompt], greedy(), use_tqdm=False)
            assert output["token_ids"] == tokens
            assert output["prompt_token_ids"] == prompt


@pytest.mark.parametrize(
    ("chunk", "block_size", "caching", "overlap", "every"),
    [(7, 16, True, False, 8), (7, 256, False, True, 8), (64, 256, True, True, 3), (64, 16, False, False, 3)],
)
def test_prompts_in_chunks_give_the_tokens_of_transformers(
    oracle: Oracle, chunk: int, block_size: int, caching: bool, overlap: bool, every: int
) -> None:
    prompts, expected = oracle.short()
    options = {"kvcache_block_size": block_size, "enable_prefix_caching": caching, "max_num_batched_tokens": chunk}
    with engine(oracle.folder, overlap, **options) as llm:
        assert tokens_of(llm.generate(prompts[::every], greedy(), use_tqdm=False)) == expected[::every]
        assert llm.stats()["steps"] > sum(map(len, prompts[::every])) // chunk


@pytest.mark.parametrize(("caching", "overlap"), [(True, True), (False, False)])
def test_a_small_pool_preempts_and_changes_no_token(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, caching: bool, overlap: bool
) -> None:
    prompts, expected = oracle.long()
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 12, "enable_prefix_caching": caching}
    with engine(oracle.folder, overlap, **options) as llm:
        monkeypatch.setattr(llm.scheduler, "_growth_fits", lambda *_: True)  # no watermark: it admits too many
        assert tokens_of(llm.generate(prompts, greedy(50, ignore_eos=False), use_tqdm=False)) == expected
        assert llm.stats()["preemptions"] >= 20
        assert llm.stats()["num_free_blocks"] == 12


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_the_same_prompts_sent_twice_hit_the_cache_and_give_the_same_tokens(oracle: Oracle, overlap: bool) -> None:
    prompts, expected = oracle.short()
    prompts, expected = prompts[::4], expected[::4]
    with engine(oracle.folder, overlap, kvcache_block_size=16, num_kvcache_blocks=2000) as llm:
        first = llm.generate(prompts, greedy(), use_tqdm=False)
        assert llm.stats()["cached_prompt_tokens"] == 0
        second = llm.generate(prompts, greedy(), use_tqdm=False)
        assert tokens_of(first) == tokens_of(second) == expected
        hits = [output["num_cached_tokens"] for output in second]
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        assert llm.stats()["cached_prompt_tokens"] == sum(hits) > 0


def test_without_prefix_caching_nothing_is_cached_and_the_tokens_are_the_same(oracle: Oracle) -> None:
    prompts, expected = oracle.short()
    prompts, expected = prompts[::10] * 2, expected[::10] * 2
    with engine(oracle.folder, kvcache_block_size=16, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert tokens_of(outputs) == expected
        assert [output["num_cached_tokens"] for output in outputs] == [0] * len(prompts)


def test_identical_prompts_admitted_together_share_blocks_and_give_the_same_tokens(oracle: Oracle) -> None:
    prompts, expected = oracle.short()
    with engine(oracle.folder, kvcache_block_size=16) as llm:
        outputs = llm.generate([prompts[-1]] * 5, greedy(), use_tqdm=False)
        assert tokens_of(outputs) == [expected[-1]] * 5
        assert [output["num_cached_tokens"] for output in outputs] == [0] + [288] * 4


def test_a_prefix_whose_blocks_were_reused_is_computed_again(oracle: Oracle) -> None:
    prompts, expected = oracle.short()
    first, others = prompts[-8], prompts[-7:]
    with engine(oracle.folder, kvcache_block_size=16, num_kvcache_blocks=24) as llm:
        llm.generate([first], greedy(), use_tqdm=False)
        for i, other in enumerate(others):
            assert tokens_of(llm.generate([other], greedy(), use_tqdm=False)) == [expected[-7 + i]]
        (again,) = llm.generate([first], greedy(), use_tqdm=False)
        assert again["token_ids"] == expected[-8]
        assert again["num_cached_tokens"] == 0


@pytest.mark.parametrize("options", [{}, {"kvcache_block_size": 16, "max_num_batched_tokens": 64}], ids=["", "chunks"])
def test_logits_of_prefill_and_decode_are_those_of_transformers(oracle: Oracle, options: dict[str, int]) -> None:
    with engine(oracle.folder, **options) as llm:
        seen: list[torch.Tensor] = []
        compute_logits = llm.runner.model.compute_logits

        def spy(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(compute_logits(hidden, out).clone())
            return seen[-1]

        llm.runner.model.compute_logits = spy
        for i in (0, 60, 130, 199):
            seen.clear()
            llm.generate([oracle.prompts[i]], greedy(), use_tqdm=False)
            ours = torch.cat([logits[-1:] for logits in seen])
            torch.testing.assert_close(ours, oracle.logits[i].float(), rtol=0, atol=1e-4)


# Rope types and the two styles of config.json


def rope_fields(theta: float, **rope: Any) -> dict[str, Any]:
    """As the installed transformers takes them."""
    if TRANSFORMERS_5:
        return {"rope_parameters": {"rope_theta": theta, **rope}}
    return {"rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-all-fields": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2,
        "attention_factor": 1.5, "truncate": False,
    },
}  # fmt: skip
THETA = 50_000.0


@pytest.fixture(scope="module", params=list(ROPES))
def roped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Oracle]:
    fields = rope_fields(THETA, **ROPES[request.param])
    folder = save_random_qwen3(
        tmp_path_factory.mktemp(request.param), num_hidden_layers=2, max_position_embeddings=512, **fields
    )
    return request.param, ask_transformers(folder, [(n, 2, 8) for n in (3, 70, 200, 330)])


def variant(source: str, target: Path, **fields: Any) -> str:
    """A copy of a checkpoint with other fields in its config.json; `None` removes one."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.update(fields)
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(target)


def answers(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    with engine(folder, kvcache_block_size=16) as llm:
        return tokens_of(llm.generate(prompts, greedy(8), use_tqdm=False))


def test_every_rope_type_gives_the_tokens_of_transformers(roped: tuple[str, Oracle]) -> None:
    _, oracle = roped
    assert answers(oracle.folder, oracle.prompts) == oracle.tokens


def test_a_rope_setting_that_is_dropped_would_be_seen(roped: tuple[str, Oracle], tmp_path: Path) -> None:
    name, oracle = roped
    theta = 10_000.0 if name == "default" else THETA
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": None, "rope_theta": None}
    assert answers(variant(oracle.folder, tmp_path / "plain", **plain), oracle.prompts) != oracle.tokens


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_config_of_transformers_4_gives_the_same_tokens(roped: tuple[str, Oracle], tmp_path: Path, key: str) -> None:
    name, oracle = roped
    rope = dict(ROPES[name])
    rope[key] = rope.pop("rope_type")
    fields = {
        "rope_parameters": None, "rope_theta": THETA, "rope_scaling": None if name == "default" else rope,
        "torch_dtype": "float32", "dtype": None,
    }  # fmt: skip
    assert answers(variant(oracle.folder, tmp_path / "v4", **fields), oracle.prompts) == oracle.tokens


def test_a_config_of_transformers_5_gives_the_same_tokens(roped: tuple[str, Oracle], tmp_path: Path) -> None:
    name, oracle = roped
    fields = {
        "rope_parameters": {"rope_theta": THETA, **ROPES[name]}, "rope_theta": None, "rope_scaling": None,
        "torch_dtype": None, "dtype": "float32",
    }  # fmt: skip
    assert answers(variant(oracle.folder, tmp_path / "v5", **fields), oracle.prompts) == oracle.tokens


def test_an_unknown_rope_type_is_refused_by_name(random_model: str, tmp_path: Path) -> None:
    folder = variant(random_model, tmp_path / "rope", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"spiral.*yarn"):
        LLM(folder)


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor=0.0 must be a number > 0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 128}, "factor"),
    ],
)
def test_a_rope_setting_that_is_missing_is_named(
    random_model: str, tmp_path: Path, rope: dict[str, Any], missing: str
) -> None:
    folder = variant(random_model, tmp_path / "rope", rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(ValueError, match=missing):
        LLM(folder)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_golden_answers_of_the_trained_model_come_out_exactly(tiny_model: str, overlap: bool) -> None:
    golden = json.loads((Path(__file__).parent / "data" / "golden.json").read_text(encoding="utf-8"))["answers"]
    golden = golden[::8]
    with engine(tiny_model, overlap) as llm:
        params = SamplingParams(temperature=0, max_tokens=300)
        outputs = llm.generate([answer["prompt_token_ids"] for answer in golden], params, use_tqdm=False)
    assert tokens_of(outputs) == [answer["token_ids"] for answer in golden]
    assert [output["text"] for output in outputs] == [answer["text"] for answer in golden]
    assert {output["finish_reason"] for output in outputs} == {"stop"}


# The kernels of `kernels/linear.py` are for GPUs; here the interpreter runs them inside of a model.


@pytest.fixture
def few_rows_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: bool) -> bool:
        (n, k), rows = weight.shape, x.shape[0]
        return bias is None and rows <= (256 if add else 64) and (rows == 1 or (n % 64 == 0 and k % 128 == 0))

    monkeypatch.setattr(linear, "_fits", fits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize(("intermediate_size", "known"), [(256, 4), (160, 3)])
def test_norms_from_sums_of_squares_give_the_log_probabilities_of_plain_norms(
    intermediate_size: int, known: int, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 70, 6, 2 and 1 rows; 160: the product after the activation is none of ours, its sums are unknown.

    With 70 rows the norm is applied after the product, by the activation or with the rotary embedding."""
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_random_qwen3(tmp_path, vocab_size=64, intermediate_size=intermediate_size, **shape)
    prompts = [list(range(2, 7)), [9], [i % 60 + 2 for i in range(70)]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in (2, 4, 1)]

    def answers() -> list[Any]:
        with engine(folder) as llm:
            return [llm.generate(p, s, use_tqdm=False) for p, s in ((prompts[:2], params[:2]), (prompts[2], params[2]))]

    expected = answers()
    request.getfixturevalue("few_rows_everywhere")
    steps: list[tuple[int, bool]] = []
    pending: list[int] = []
    product, pend = linear.norm_linear_triton, linear.PendingNorm

    def watch(x: torch.Tensor, squares: torch.Tensor | None, *args: Any) -> torch.Tensor:
        if squares is not None:
            assert torch.allclose(squares.sum(1), x.square().sum(1), rtol=1e-4)
        steps.append((len(x), squares is not None))
        return product(x, squares, *args)

    def watch_pending(squares: torch.Tensor, *args: Any) -> Any:
        pending.append(len(squares))
        return pend(squares, *args)

    monkeypatch.setattr(linear, "norm_linear_triton", watch)
    monkeypatch.setattr(linear, "PendingNorm", watch_pending)
    for ours, theirs in zip(answers(), expected):
        for a, b in zip(ours, theirs, strict=True):
            assert a["token_ids"] == b["token_ids"]
            for x, y in zip(a["logprobs"], b["logprobs"]):
                assert x == pytest.approx(y, abs=1e-3)
    assert {rows for rows, _ in steps} == {6, 2, 1}
    assert sum(has for rows, has in steps if rows == 6) == known
    of_one = [has for rows, has in steps if rows == 1]
    assert sum(of_one) == len(of_one) / 4  # those of the embedding
    assert pending == [70] * known


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_squares_of_one_rank_are_not_taken_for_those_of_the_sum(
    few_rows_everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parallel, "all_reduce", lambda self, x: 3 * x)
    factory = {"dtype": torch.float32, "device": torch.device("cpu")}
    for rank, size, known in ((0, 1, True), (0, 2, False), (1, 2, False)):
        layer = RowParallelLinear(256, 64, (128 * rank, 256 // size), False, Parallel(rank, size), **factory)
        stream = layer(torch.randn(2, 256 // size), residual := torch.ones(2, 64))
        assert (stream.squares is not None) == known
        assert torch.equal(stream.x, residual if known else 3 * residual)
        embedding = VocabParallelEmbedding(10, 64, Parallel(rank, size), **factory)
        assert (embedding(torch.tensor([2, 7])).squares is not None) == known
