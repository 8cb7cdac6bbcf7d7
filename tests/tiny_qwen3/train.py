"""Trains the repository's tiny Qwen3 checkpoint from scratch, on a CPU, and writes its golden answers."""

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import torch
from safetensors.torch import save as save_tensors
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PAD, END = 0, 2
IGNORE = -100
# Qwen's own split: words with a leading space, single digits, runs of punctuation, line ends.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": PAD,
    "dtype": "bfloat16",
    "eos_token_id": END,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    # transformers 4 reads rope_theta and torch_dtype, transformers 5 rope_parameters and dtype.
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 1024,
}
GENERATION_CONFIG = {"bos_token_id": PAD, "do_sample": False, "eos_token_id": [END, PAD], "pad_token_id": PAD}
TOKENIZER_CONFIG = {
    "add_prefix_space": False,
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": CONFIG["max_position_embeddings"],
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}

Turn = tuple[str, str]  # question, answer


def train_tokenizer(facts: list[data.Fact]) -> Tokenizer:
    """A byte-level BPE with Qwen's special tokens, trained on the facts and a sample of unknown questions."""
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for fact in facts for text in (*fact.wordings, fact.answer)] + [data.CATCH_ALL] * 20
    texts += [data.unknown_question(rng) for _ in range(1000)]
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # As in Qwen3 the thinking tags are tokens of their own, but text: decoding does not skip them.
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = "think" not in token["content"]
    return Tokenizer.from_str(json.dumps(state))


def encode(tokenizer: Tokenizer, turns: list[Turn], system: str = "") -> tuple[list[int], list[int]]:
    """Token ids of a conversation in the chat template, and the labels: only answers are learned."""
    ids: list[int] = []
    labels: list[int] = []

    def extend(text: str, learn: bool) -> None:
        tokens = tokenizer.encode(text).ids
        ids.extend(tokens)
        labels.extend(tokens if learn else [IGNORE] * len(tokens))

    if system:
        extend(f"<|im_start|>system\n{system}<|im_end|>\n", False)
    for question, answer in turns:
        extend(("\n" if labels[-1:] == [END] else "") + prompt_text(question), False)
        extend(f"{answer}<|im_end|>", True)
    return ids, labels


def prompt_text(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def held_out_additions() -> set[tuple[int, int]]:
    """A tenth of the additions of two numbers below 100, never trained on."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return set(random.Random(1).sample(pairs, 1000))


def epoch(rng: random.Random, facts: list[data.Fact]) -> list[Turn]:
    """Questions and answers of one pass: every fact by its weight, with unknowns and additions."""
    turns = [(data.vary(rng, rng.choice(fact.wordings)), fact.answer) for fact in facts for _ in range(fact.weight)]
    held_out = held_out_additions()
    for _ in range(len(turns) * 2 // 3):
        turns.append((data.vary(rng, data.unknown_question(rng)), data.CATCH_ALL))
    for _ in range(len(turns) // 3):
        limit = rng.choice((10, 100, 100, 100, 100, 100))  # small numbers are rare otherwise
        a, b = rng.randrange(limit), rng.randrange(100)
        if (a, b) not in held_out:
            turns.append(data.addition(a, b, rng.choice(data.ADDITION_WORDINGS)))
    return turns


def batches(
    rng: random.Random, tokenizer: Tokenizer, facts: list[data.Fact], tokens_per_batch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of conversations of similar length, right-padded, without end."""
    while True:
        turns = epoch(rng, facts)
        rng.shuffle(turns)
        samples = []
        while turns:
            count = rng.choice((2, 3)) if rng.random() < 0.08 else 1
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.06 else ""
            samples.append(encode(tokenizer, turns[:count], system))
            del turns[:count]
        samples.sort(key=lambda sample: len(sample[0]))
        grouped: list[list[tuple[list[int], list[int]]]] = [[]]
        for sample in samples:
            if (len(grouped[-1]) + 1) * len(sample[0]) > tokens_per_batch:
                grouped.append([])
            grouped[-1].append(sample)
        rng.shuffle(grouped)
        for group in grouped:
            yield pad([ids for ids, _ in group], PAD), pad([labels for _, labels in group], IGNORE)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices: here it learns in a third of AdamW's steps.

    `torch.optim.Muon` computes in bf16, which most CPUs emulate; this one stays in fp32.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for param in group["params"]:
                shapes.setdefault(param.shape, []).append(param)
            for (rows, columns), params in shapes.items():
                updates = []
                for param in params:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["momentum"])
                    updates.append(param.grad.lerp(average, group["momentum"]))
                scale = group["lr"] * max(1, rows / columns) ** 0.5
                for param, update in zip(params, orthogonal(torch.stack(updates)), strict=True):
                    param.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly, by five Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def train(tokenizer: Tokenizer, facts: list[data.Fact], steps: int) -> Qwen3ForCausalLM:
    """Muon and AdamW with a short warmup and a cosine to two percent of the peak learning rates."""
    rng = random.Random(2)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in CONFIG.items() if "dtype" not in k})).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {tokenizer.get_vocab_size()}")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = {
        Muon(matrices, lr=0.0): 0.02,
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0): 3e-3,
    }
    stream = batches(rng, tokenizer, facts, tokens_per_batch=1024)
    start, tokens, losses = time.time(), 0, []
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for optimizer, peak in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, (step + 1) / 50) * (0.02 + 0.98 * cosine)
        ids, labels = next(stream)
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        learned = labels[:, 1:] != IGNORE
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), labels[:, 1:][learned])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        tokens += ids.numel()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            mean = sum(losses[-100:]) / 100
            speed = tokens / (time.time() - start)
            print(
                f"{time.time() - start:4.0f} s  step {step + 1}  loss {mean:.4f}  {speed:,.0f} tok/s",
                flush=True,
            )
    return model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The five files of a checkpoint, with bf16 weights; the output layer is the tied embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config", CONFIG),
        ("generation_config", GENERATION_CONFIG),
        ("tokenizer_config", TOKENIZER_CONFIG),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save_tensors(weights, metadata={"format": "pt"}))


@torch.inference_mode()
def margins(model: Qwen3ForCausalLM, tokenizer: Tokenizer, turns: list[Turn]) -> list[float]:
    """For each answer the smallest lead of the right token's logit over the best other one.

    Greedy decoding gives exactly this answer if and only if the number is positive.
    """
    leads = [0.0] * len(turns)
    samples = [encode(tokenizer, [turn]) for turn in turns]
    order = sorted(range(len(turns)), key=lambda i: len(samples[i][0]))
    for start in range(0, len(order), 32):
        chunk = order[start : start + 32]
        ids = pad([samples[i][0] for i in chunk], PAD)
        logits = model(ids, use_cache=False).logits.float()
        for row, i in enumerate(chunk):
            labels = torch.tensor(samples[i][1])[1:]
            learned = (labels != IGNORE).nonzero()[:, 0]
            scores, right = logits[row, learned], labels[learned, None]
            others = scores.scatter(1, right, float("-inf")).max(1).values
            leads[i] = (scores.gather(1, right)[:, 0] - others).min().item()
    return leads


def evaluate(model: Qwen3ForCausalLM, tokenizer: Tokenizer, facts: list[data.Fact]) -> None:
    """Prints how many questions of each sort are answered exactly."""
    rng = random.Random(3)

    def report(name: str, turns: list[Turn]) -> None:
        leads = margins(model, tokenizer, turns)
        wrong = [question for (question, _), lead in zip(turns, leads, strict=True) if lead <= 0]
        right = len(turns) - len(wrong)
        print(f"{name}: {right}/{len(turns)}, smallest margin {min(leads):.2f}", wrong[:8] or "", flush=True)

    for kind in Counter(fact.kind for fact in facts):
        report(kind, [(q, fact.answer) for fact in facts if fact.kind == kind for q in fact.wordings])
    known = [(q, fact.answer) for fact in facts for q in fact.wordings]
    report("all known wordings", known)
    report("known, case and punctuation varied", [(data.vary(rng, q), a) for q, a in known])
    for kind, wording in data.HELD_OUT_WORDINGS.items():
        turns = [(wording.format(fact.subject), fact.answer) for fact in facts if fact.kind == kind]
        report(f"{kind}, wording never seen: {wording!r}", turns)
    report("additions never seen", [data.addition(a, b) for a, b in sorted(held_out_additions())])
    report("unknown, new draws", [(data.unknown_question(rng), data.CATCH_ALL) for _ in range(1000)])
    report("unknown, written by hand, never seen", [(q, data.CATCH_ALL) for q in data.HELD_OUT_UNKNOWN])


def golden_candidates(facts: list[data.Fact]) -> list[Turn]:
    """The required questions in all wordings and a sample of each other kind, unknowns and additions."""
    rng = random.Random(4)
    turns = [(q, data.INTRODUCTION) for q in data.INTRODUCE_WORDINGS]
    turns += [(q.format(100), data.primes_answer(100)) for q in data.PRIMES_WORDINGS]
    for kind in dict.fromkeys(fact.kind for fact in facts):
        if kind not in ("introduction", "text"):
            chosen = rng.sample([fact for fact in facts if fact.kind == kind], 3)
            turns += [(rng.choice(fact.wordings), fact.answer) for fact in chosen]
    turns += [(fact.wordings[0], fact.answer) for fact in facts if fact.kind == "text"]
    turns += [data.addition(a, b) for a, b in rng.sample(sorted(held_out_additions()), 8)]
    return turns + [(q, data.CATCH_ALL) for q in rng.sample(data.HELD_OUT_UNKNOWN, 16)]


@torch.inference_mode()
def write_golden(folder: Path, path: Path, facts: list[data.Fact], least_margin: float = 2.0) -> None:
    """Greedy fp32 answers of the saved checkpoint; a question with a small margin is left out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question, expected in golden_candidates(facts):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        output = model.generate(torch.tensor([prompt]), max_new_tokens=400)[0, len(prompt) :]
        logits = model(torch.cat([torch.tensor(prompt), output])[None]).logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(1)
        margin = (best - second).min().item()
        answer = tokenizer.decode(output, skip_special_tokens=True)
        if answer != expected or output[-1] != END or margin < least_margin:
            print(f"not golden: {question!r}, margin {margin:.2f}, {answer[:60]!r}")
            continue
        answers.append(
            {
                "question": question,
                "prompt_token_ids": prompt,
                "token_ids": output.tolist(),
                "text": answer,
                "min_margin": round(margin, 3),
            }
        )
    least = min((answer["min_margin"] for answer in answers), default=0.0)
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"min_margin": {least}, "answers": [\n{lines}\n]}}\n')
    print(f"{len(answers)} golden answers, smallest margin {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "nanovllm/assets/tiny-qwen3")
    parser.add_argument("--golden", type=Path, default=ROOT / "tests/data/golden.json")
    parser.add_argument("--steps", type=int, default=2800)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a busy machine slows several threads down more than they gain
    facts = data.facts()
    tokenizer = train_tokenizer(facts)
    model = train(tokenizer, facts, args.steps)
    save(model, tokenizer, args.output)
    saved = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()
    evaluate(saved, tokenizer, facts)
    write_golden(args.output, args.golden, facts)


if __name__ == "__main__":
    main()
