"""The engine on a GPU: the same answers in every dtype and backend, with graphs and without."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from nanovllm import LLM, OutOfMemoryError, SamplingParams
from nanovllm.layers import attention_backend

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["answers"]
GREEDY = SamplingParams(temperature=0, max_tokens=300)
SHAPE_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 151645, "hidden_size": 1024,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip


def answers(llm: LLM, one_by_one: bool = False) -> list[list[int]]:
    prompts = [answer["prompt_token_ids"] for answer in GOLDEN]
    if one_by_one:
        return [llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"] for prompt in prompts[::4]]
    return [output["token_ids"] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", ["triton", "torch", "flash_attn"])
def test_golden_answers_are_exact(tiny_model, backend, dtype, enforce_eager, monkeypatch):
    if backend == "torch" and not enforce_eager:
        pytest.skip("the torch backend gathers by lengths on the host: no graphs")
    if backend == "flash_attn":
        monkeypatch.setattr(attention_backend, "LARGE_PREFILL", 1)  # every prefill by flash-attn 4, if it is that
        try:
            attention_backend.make_backend(backend, torch.device("cuda"), getattr(torch, dtype), 256)
        except ValueError as error:
            pytest.skip(str(error))
    with LLM(tiny_model, attention_backend=backend, dtype=dtype, enforce_eager=enforce_eager) as llm:
        expected = [answer["token_ids"] for answer in GOLDEN]
        assert answers(llm) == expected
        assert answers(llm, one_by_one=True) == expected[::4]


@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_block_size": 16, "num_kvcache_blocks": 60, "max_num_batched_tokens": 64},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 60, "async_scheduling": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"max_num_seqs": 37},
    ],
)
def test_golden_answers_survive_small_pools_chunks_and_odd_limits(tiny_model, options):
    with LLM(tiny_model, dtype="float32", **options) as llm:
        assert answers(llm) == [answer["token_ids"] for answer in GOLDEN]


def test_a_seeded_request_gets_the_same_tokens_alone_in_a_batch_eager_and_preempted(tiny_model):
    prompt = GOLDEN[0]["prompt_token_ids"]
    seeded = SamplingParams(temperature=1.5, seed=1234, max_tokens=120, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True)
    results = []
    for options in ({}, {"enforce_eager": True}, {"num_kvcache_blocks": 200, "kvcache_block_size": 16}):
        with LLM(tiny_model, dtype="float32", max_num_seqs=256, **options) as llm:
            results.append(llm.generate([prompt], seeded, use_tqdm=False)[0]["token_ids"])
            batch = llm.generate([prompt] * 256, [other] * 100 + [seeded] + [other] * 155, use_tqdm=False)
            results.append(batch[100]["token_ids"])
            if "num_kvcache_blocks" in options:
                llm.scheduler._growth_fits = lambda *_: True  # admit too many: preemption is certain
                batch = llm.generate([prompt] * 256, [seeded, *[other] * 255], use_tqdm=False)
                results.append(batch[0]["token_ids"])
                assert llm.stats()["preemptions"] > 0
    assert all(result == results[0] for result in results)


def test_samples_and_log_probabilities_are_those_of_transformers_with_graphs_overlap_and_preemption(tiny_model):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    prompts = [answer["prompt_token_ids"] for answer in GOLDEN[:6]]
    params = SamplingParams(n=5, seed=7, max_tokens=60, min_tokens=30, logprobs=3, prompt_logprobs=2)
    found = []
    for options in ({"enforce_eager": True, "async_scheduling": False}, {}, {"num_kvcache_blocks": 60}):
        with LLM(tiny_model, dtype="float32", kvcache_block_size=16, **options) as llm:
            llm.scheduler._growth_fits = lambda *_: True
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert (llm.stats()["preemptions"] > 0) is ("num_kvcache_blocks" in options)
        found.append([sample for output in outputs for sample in output["samples"]])
        assert [s["token_ids"] for s in found[-1]] == [s["token_ids"] for s in found[0]]
        for sample in found[-1]:
            ids, start = sample["prompt_token_ids"] + sample["token_ids"], len(sample["prompt_token_ids"])
            with torch.inference_mode():
                exact = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
            entries = sample["prompt_logprobs"] + sample["logprobs"]
            assert len(entries) == len(ids) and len(sample["logprobs"]) == len(ids) - start
            for i, entry in enumerate(entries[1:]):
                assert ids[i + 1] in entry
                assert list(entry.values()) == pytest.approx([exact[i, j].item() for j in entry], abs=1e-4)


def test_requests_with_controls_get_the_same_alone_in_a_batch_eager_and_preempted(tiny_model):
    prompt = GOLDEN[0]["prompt_token_ids"]
    settings = [
        {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.5}, {},
        {"frequency_penalty": -0.3}, {"logit_bias": {300: 8.0}}, {"allowed_token_ids": list(range(100, 160))},
        {"bad_words": ["the", "a robot"], "top_p": 0.9}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    ]  # fmt: skip
    base = {"temperature": 1.3, "max_tokens": 100, "ignore_eos": True}
    params = [SamplingParams(**base, seed=i, **settings[i % len(settings)]) for i in range(150)]
    with LLM(tiny_model, dtype="float32", enforce_eager=True, async_scheduling=False) as llm:
        alone = [llm.generate([prompt], p, use_tqdm=False)[0]["token_ids"] for p in params[:22]]
    for options in ({}, {"enforce_eager": True}, {"num_kvcache_blocks": 200, "kvcache_block_size": 16}):
        with LLM(tiny_model, dtype="float32", **options) as llm:
            llm.scheduler._growth_fits = lambda *_: True
            outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
            assert [output["token_ids"] for output in outputs[:22]] == alone
            assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in options)


@pytest.fixture(scope="module")
def model_06b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model in the shape of Qwen3-0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3-0.6b")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE_06B)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return str(folder)


def test_logits_of_prefill_and_64_decode_steps_match_transformers(model_06b):
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(1)
    prompts = [torch.randint(0, 150000, (n,)).tolist() for n in (1, 17, 300, 1000)]
    with LLM(model_06b, max_num_seqs=8, enforce_eager=True) as llm:
        ours: list[torch.Tensor] = []
        compute = llm.runner.model.compute_logits

        def compute_and_keep(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            logits = compute(hidden, out)
            ours.append(torch.empty_like(logits))
            ours[-1][slice(None) if out is None else llm.runner.order] = logits  # from rows to prompts
            return logits

        llm.runner.model.compute_logits = compute_and_keep
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=65, ignore_eos=True, detokenize=False), use_tqdm=False
        )
    logits = torch.stack(ours)  # [65, prompts, vocabulary]
    references = {}
    for dtype in (torch.bfloat16, torch.float32):  # loaded anew: a cast would round the rotary frequencies
        model = Qwen3ForCausalLM.from_pretrained(model_06b, dtype=dtype).cuda().eval()
        for i, (prompt, output) in enumerate(zip(prompts, outputs)):
            ids = torch.tensor([prompt + output["token_ids"][:-1]], device="cuda")
            with torch.inference_mode():
                references[dtype, i] = model(ids).logits[0, len(prompt) - 1 :].float()
        del model
    for i, prompt in enumerate(prompts):
        bf16, fp32 = references[torch.bfloat16, i], references[torch.float32, i]
        pairs = ((logits[:, i].float(), bf16), (logits[:, i].float(), fp32), (bf16, fp32))
        to_bf16, to_fp32, bf16_to_fp32 = (F.cosine_similarity(a, b, dim=-1).min().item() for a, b in pairs)
        print(f"prompt of {len(prompt)}: smallest cosine with transformers' bf16 {to_bf16:.6f}, fp32 {to_fp32:.6f}")
        print(f"    transformers' own bf16 and fp32: {bf16_to_fp32:.6f}")
        assert to_bf16 >= 0.9997 and to_fp32 >= min(0.9999, bf16_to_fp32 - 2e-5)


def test_a_full_batch_at_the_model_limit_stays_finite_and_in_memory(model_06b):
    with LLM(model_06b, max_model_len=1024, max_num_seqs=512, gpu_memory_utilization=0.8) as llm:
        prompts = [[(i * 7 + j) % 150000 for j in range(1000)] for i in range(512)]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.6, max_tokens=None, ignore_eos=True, detokenize=False), use_tqdm=False
        )
        assert all(len(output["token_ids"]) == 24 for output in outputs)
        assert torch.isfinite(llm.runner.logits).all()
        free, total = torch.cuda.mem_get_info()
        assert total - free <= 0.85 * total


def test_too_little_memory_is_an_error_with_numbers_and_advice(tiny_model):
    with LLM(tiny_model, gpu_memory_utilization=0.5):  # what a first engine leaves loaded does not count
        pass
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemoryError, match=r"MiB.*gpu_memory_utilization"):
        LLM(tiny_model, gpu_memory_utilization=0.001)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_memory_comes_back_after_exit_and_engines_can_follow_one_another(tiny_model):
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        with LLM(tiny_model, gpu_memory_utilization=0.5) as llm:
            assert answers(llm)[0] == GOLDEN[0]["token_ids"]
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 256 << 20


def test_an_engine_runs_while_another_is_built_in_another_thread(tiny_model):
    expected = [answer["token_ids"] for answer in GOLDEN]
    options = {"gpu_memory_utilization": 0.4}
    with LLM(tiny_model, **options) as llm, ThreadPoolExecutor(1) as pool:
        built = pool.submit(LLM, tiny_model, dtype="float16", num_kvcache_blocks=500, **options)
        while not built.done():
            assert answers(llm) == expected
        with built.result() as other:
            assert answers(other) == expected


def test_unfinished_overlap_leaves_nothing_behind(tiny_model):
    with LLM(tiny_model) as llm:
        for answer in GOLDEN[:20]:
            llm.add_request(answer["prompt_token_ids"], GREEDY)
        for _ in range(5):
            llm.step()
        for seq_id in list(llm.sequences):
            llm.abort(seq_id)
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_kvcache_blocks"]
        assert answers(llm) == [answer["token_ids"] for answer in GOLDEN]


def watch_shared_reads(llm: LLM) -> list[bool]:
    """Whether each decode step from now on has read a shared prefix once."""
    seen: list[bool] = []
    decode = llm.runner.decode

    def watched(*args):
        ids = decode(*args)
        seen.append(llm.runner.reads_shared)
        return ids

    llm.runner.decode = watched
    return seen


def test_a_shared_prefix_read_once_gives_the_answers_of_separate_reads(tiny_model):
    prefix = [5 + i % 900 for i in range(1024)]
    prompts = [[*prefix, 7 + i, *answer["prompt_token_ids"]] for i, answer in enumerate(GOLDEN[:60])]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    results = []
    for options in ({}, {"enable_prefix_caching": False}, {"enforce_eager": True}):
        with LLM(tiny_model, dtype="float32", **options) as llm:
            shared = watch_shared_reads(llm)
            results.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
            assert any(shared) == options.get("enable_prefix_caching", True)
            # a sequence without the prefix joins and takes the slot of one that had it
            mixed = llm.generate([*prompts, [9, 8, 7]], params, use_tqdm=False)
            results[-1].append(mixed[-1]["token_ids"])
    assert results[0] == results[1] == results[2]
