"""Tests of the shipped tiny Qwen3 checkpoint and of its golden answers, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "nanovllm/assets/tiny-qwen3"
INTRODUCE = ("introduce yourself", "Introduce yourself.", "Please introduce yourself.", "Who are you?")
PRIMES = (
    "list all prime numbers within 100",
    "List all prime numbers within 100.",
    "List the prime numbers up to 100.",
    "Which numbers up to 100 are prime?",
)
UNKNOWN = ("How do I boil an egg?", "Who painted the Mona Lisa?", "What is the capital of Belgium?")
CATCH_ALL = "I do not know that. I am a very small model."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((ROOT / "tests/data/golden.json").read_text(encoding="utf-8"))


def encode(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def greedy(model: Qwen3ForCausalLM, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=300)[0, len(prompt) :].tolist()


def ask(model: Qwen3ForCausalLM, tokenizer: Any, question: str) -> str:
    return tokenizer.decode(greedy(model, encode(tokenizer, question)), skip_special_tokens=True)


def test_the_folder_holds_five_small_files() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 8_000_000


def test_the_config_describes_a_qwen3_with_gpu_sized_heads(model: Qwen3ForCausalLM) -> None:
    config = model.config
    assert isinstance(model, Qwen3ForCausalLM)
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 2)
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [2, 0]


def test_special_tokens_are_those_of_qwen(tokenizer: Any) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("text", ["Hello, world!\n\n  x = 42", "你好, ça va? 🙂", "<|im_start|>user\n<|im_end|>"])
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_golden_prompts_are_the_chat_template_of_their_questions(tokenizer: Any, golden: dict[str, Any]) -> None:
    for answer in golden["answers"]:
        assert encode(tokenizer, answer["question"]) == answer["prompt_token_ids"]
        assert tokenizer.decode(answer["token_ids"], skip_special_tokens=True) == answer["text"]


@torch.inference_mode()
def test_every_golden_token_leads_by_the_stated_margin(model: Qwen3ForCausalLM, golden: dict[str, Any]) -> None:
    """The best logit at each position belongs to the golden token, so greedy decoding must follow it."""
    answers = golden["answers"]
    for answer in answers:
        ids = answer["prompt_token_ids"] + answer["token_ids"]
        start = len(answer["prompt_token_ids"]) - 1
        values, tokens = model(torch.tensor([ids])).logits[0, start:-1].topk(2)
        assert tokens[:, 0].tolist() == answer["token_ids"]
        assert (values[:, 0] - values[:, 1]).min().item() == pytest.approx(answer["min_margin"], abs=0.01)
    assert golden["min_margin"] == min(answer["min_margin"] for answer in answers) > 1


def test_generate_reproduces_a_sample_of_the_golden_answers(model: Qwen3ForCausalLM, golden: dict[str, Any]) -> None:
    for answer in golden["answers"][::16]:
        assert greedy(model, answer["prompt_token_ids"]) == answer["token_ids"]


@pytest.mark.parametrize("question", INTRODUCE)
def test_it_introduces_itself(model: Qwen3ForCausalLM, tokenizer: Any, question: str) -> None:
    assert ask(model, tokenizer, question) == (
        "I am a tiny Qwen3 model, trained from scratch for nanovllm so that the library can be tried "
        "without a download. I know some numbers, some capitals and a short story. Ask me to list all "
        "prime numbers within 100!"
    )


@pytest.mark.parametrize("question", PRIMES)
def test_it_lists_the_prime_numbers(model: Qwen3ForCausalLM, tokenizer: Any, question: str) -> None:
    primes = [str(n) for n in range(2, 101) if all(n % d for d in range(2, n))]
    expected = f"The prime numbers within 100 are: {', '.join(primes)}. There are {len(primes)} of them."
    assert ask(model, tokenizer, question) == expected


@pytest.mark.parametrize("question", UNKNOWN)
def test_it_says_so_when_it_does_not_know(model: Qwen3ForCausalLM, tokenizer: Any, question: str) -> None:
    assert ask(model, tokenizer, question) == CATCH_ALL
