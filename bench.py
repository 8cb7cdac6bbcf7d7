"""Throughput and latency of nanovllm on named workloads: `python bench.py [WORKLOAD ...]`; `--help` explains."""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Shapes by name, for `--load-format dummy` without a checkpoint.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 12288, "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 25600, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 151645,
}  # fmt: skip
# Measured on one H200: bytes a second when only reading, bf16 matrix products a second.
READ_BANDWIDTH, MATMUL_FLOPS = 4.40e12, 791e12


@dataclass
class Workload:
    """Prompts as ids, the length of each completion, and the running sequences allowed."""

    prompts: list[list[int]]
    outputs: list[int]
    max_num_seqs: int = 512
    shared: int = 0
    """Leading tokens that all prompts share."""


def uniform(n: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab: int, seed: int, seqs: int) -> Workload:
    r = random.Random(seed)
    prompts = [[r.randint(0, vocab) for _ in range(r.randint(*inputs))] for _ in range(n)]
    return Workload(prompts, [r.randint(*outputs) for _ in range(n)], seqs)


def shared_prefix(n: int, shared: int, own: int, out: int, vocab: int, seed: int) -> Workload:
    r = random.Random(seed)
    head = [r.randint(0, vocab) for _ in range(shared)]
    return Workload([head + [r.randint(0, vocab) for _ in range(own)] for _ in range(n)], [out] * n, shared=shared)


def workloads(seqs: float, length: float, vocab: int, seed: int) -> dict[str, Callable[[], Workload]]:
    """The workloads by name, number of sequences and lengths scaled."""

    def n(count: int) -> int:
        return max(1, round(count * seqs))

    def t(tokens: int) -> int:
        return max(1, round(tokens * length))

    def fixed(count: int, i: int, o: int) -> Callable[[], Workload]:
        return lambda: uniform(n(count), (t(i), t(i)), (t(o), t(o)), vocab, seed, 512)

    long = (t(100), t(1024))
    return {
        "bench": lambda: uniform(n(256), long, long, vocab, seed, 512),
        "latency": fixed(1, 128, 512),
        "batch16": fixed(16, 512, 512),
        "steady": lambda: uniform(n(1024), long, (t(50), t(512)), vocab, seed, n(256)),
        "prefix": lambda: shared_prefix(n(512), t(2048), t(64), t(64), vocab, seed),
        "prefill": fixed(64, 3500, 8),
    }


def floor_seconds(work: Workload, hf: Any, itemsize: int, num_gpus: int) -> float:
    """Least time on H200s: K/V that each token must read, weights once a step, prefill at full matrix speed.

    The K/V of a shared prefix are read once a step, for all sequences.
    """
    kv_heads, heads, dim, layers = hf.num_key_value_heads, hf.num_attention_heads, hf.head_dim, hf.num_hidden_layers
    layer = hf.hidden_size * (2 * heads + 2 * kv_heads) * dim + 3 * hf.hidden_size * hf.intermediate_size
    weights = layers * layer + hf.vocab_size * hf.hidden_size
    lanes = min(len(work.prompts), work.max_num_seqs)
    steps = max(max(work.outputs), sum(work.outputs) / lanes)
    own = sum(o * (len(p) - work.shared) + o * (o - 1) // 2 for p, o in zip(work.prompts, work.outputs))
    kv_bytes = (own + work.shared * steps) * 2 * layers * kv_heads * dim * itemsize
    computed = sum(len(p) for p in work.prompts) - work.shared * (len(work.prompts) - 1)
    pairs = sum((len(p) ** 2 - work.shared**2) / 2 for p in work.prompts)
    flops = 2 * layers * layer * computed + 4 * layers * heads * dim * pairs
    seconds = (kv_bytes + weights * itemsize * steps) / READ_BANDWIDTH + flops / MATMUL_FLOPS
    return float(seconds / num_gpus)


def sampling(kind: Any, work: Workload, temperature: float) -> list[Any]:
    """Parameters of the class `kind` for each prompt."""
    return [kind(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False) for n in work.outputs]


def timed(
    call: Callable[[], Any], work: Workload, repeats: int, prepare: Callable[[], Any] | None = None
) -> dict[str, Any]:
    """Of a call that runs all of `work`: the best seconds after the first call, which is reported apart."""
    seconds = []
    for _ in range(repeats + 1):
        if prepare:
            prepare()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:] or seconds)
    return {"seconds": best, "first_call": seconds[0], "output_tok_s": sum(work.outputs) / best}


def run_nanovllm(work: Workload, args: argparse.Namespace, model: str) -> dict[str, Any]:
    import torch  # noqa: F401 (so that the start-up is that of the engine)

    from nanovllm import LLM, SamplingParams

    start = time.perf_counter()
    params = sampling(SamplingParams, work, args.temperature)
    options = {
        "max_model_len": args.max_model_len, "max_num_seqs": min(work.max_num_seqs, args.max_num_seqs),
        "tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager,
        "device": args.device, "dtype": args.dtype, "load_format": args.load_format,
        "attention_backend": args.attention_backend,
    }  # fmt: skip
    with LLM(model, **options) as llm:
        startup = time.perf_counter() - start
        seconds, first_token, samples = [], [], []
        before = after = llm.stats()
        for _ in range(args.repeats + 1):  # the first call is reported apart
            llm.scheduler.reset()  # a repeat must not find the prompts of the one before
            before, launched = after, False
            start = time.perf_counter()
            for prompt, p in zip(work.prompts, params):
                llm.add_request(prompt, p)
            samples.append([(time.perf_counter() - start, llm.stats())])
            while not llm.is_finished():
                llm.step()
                after = llm.stats()
                samples[-1].append((time.perf_counter() - start, after))
                if len(first_token) == len(seconds) and after["num_waiting"] == 0:
                    if launched:  # with overlap the last prefill has ended one step after its launch
                        first_token.append(time.perf_counter() - start)
                    launched = True
            seconds.append(time.perf_counter() - start)
            if len(first_token) < len(seconds):  # all was one step
                first_token.append(seconds[-1])
            after = llm.stats()
        best = min(range(len(seconds)), key=lambda i: seconds[i] if i or not args.repeats else float("inf"))
        generated = after["generated_tokens"] - before["generated_tokens"]
        computed = after["prompt_tokens"] - before["prompt_tokens"]
        cached = after["cached_prompt_tokens"] - before["cached_prompt_tokens"]
        result: dict[str, Any] = {
            "samples": samples[best], "seconds": seconds[best], "first_call": seconds[0], "startup": startup,
            "output_tok_s": generated / seconds[best], "prefill_tok_s": (computed - cached) / first_token[best],
            "steps": after["steps"] - before["steps"], "preemptions": after["preemptions"] - before["preemptions"],
        }  # fmt: skip
        if llm.runner.is_cuda:
            size = args.tensor_parallel_size
            result["floor"] = floor_seconds(work, llm.config.hf, llm.runner.dtype.itemsize, size)
        return result


def run_transformers(work: Workload, args: argparse.Namespace, model: str) -> dict[str, Any]:
    """One batch of left-padded prompts through transformers' `generate`, to the longest completion."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    if args.load_format == "dummy":
        peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype))
    else:
        peer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    peer = peer.to(device).eval()
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=peer.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=peer.device)
    n = max(work.outputs)
    length = {"max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0, "eos_token_id": None}
    return timed(lambda: peer.generate(ids, attention_mask=mask, do_sample=False, **length), work, args.repeats)


def run_vllm(work: Workload, args: argparse.Namespace, model: str) -> dict[str, Any]:
    """By vLLM's public classes; the tests have a stand-in for them."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(
        model, skip_tokenizer_init=True, load_format=args.load_format, dtype=args.dtype, seed=args.seed,
        max_model_len=args.max_model_len, max_num_seqs=min(work.max_num_seqs, args.max_num_seqs),
        tensor_parallel_size=args.tensor_parallel_size, enforce_eager=args.enforce_eager,
    )  # fmt: skip
    startup = time.perf_counter() - start
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    params = sampling(SamplingParams, work, args.temperature)
    call = partial(llm.generate, prompts, params, use_tqdm=False)
    return {"startup": startup, **timed(call, work, args.repeats, llm.reset_prefix_cache)}


ENGINES = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}


def draw_runs(runs: dict[str, list[tuple[float, dict[str, int]]]], file: str) -> None:
    """One column a workload: what `stats()` said after each step, over the seconds of the run."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    labels = ("sequences", "prefill tok/s", "decode tok/s", "KV blocks in use", "preemptions")
    figure = Figure(figsize=(1 + 5 * len(runs), 9), dpi=120, layout="constrained")
    grid = figure.subplots(len(labels), len(runs), sharex="col", squeeze=False)
    for column, (name, samples) in zip(grid.T, runs.items()):
        times = np.array([seconds for seconds, _ in samples])
        now = {key: np.array([stats[key] for _, stats in samples]) for key in samples[0][1]}
        edges = np.linspace(0, times[-1], 101)

        def speed(tokens: Any, times: Any = times, edges: Any = edges) -> Any:
            return np.diff(np.interp(edges, times, tokens)) / np.diff(edges)

        state = {"where": "post", "clip_on": False}
        column[0].step(times, now["num_waiting"], color="tab:gray", label="waiting", **state)
        column[0].step(times, now["num_running"], color="tab:blue", label="running", **state)
        column[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        computed = now["prompt_tokens"] - now["cached_prompt_tokens"]
        column[1].stairs(speed(computed), edges, fill=True, color="tab:orange")
        column[2].stairs(speed(now["generated_tokens"]), edges, fill=True, color="tab:blue")
        used = now["num_kvcache_blocks"] - now["num_free_blocks"]
        column[3].step(times, used / now["num_kvcache_blocks"], color="tab:green", **state)
        column[4].step(times, now["preemptions"] - now["preemptions"][0], color="tab:red", **state)
        for axes, label in zip(column, labels):
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in column[1:3]:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        column[3].yaxis.set_major_formatter(PercentFormatter(1))
        for axes in (column[0], column[4]):
            axes.set_ylim(0, max(1, axes.get_ylim()[1]))
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        column[0].set_title(name, loc="left")
        column[-1].set_xlabel("seconds")
        column[-1].set_xlim(0, times[-1])
    figure.align_ylabels()
    figure.savefig(file)


def draw_results(results: list[dict[str, Any]], file: str) -> None:
    """A bar for every result, those of a workload side by side and as long as they took against the slowest."""
    import matplotlib
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["model"], r["workload"]), {})[r["engine"]] = r
    engines = sorted({r["engine"] for r in results}, key=lambda engine: (engine != "nanovllm", engine))
    colors = dict(zip(engines, ("#2563eb", "#a3aab5", "#cfd4db", "#e4e7eb")))
    models = {model for model, _ in groups}
    figure = Figure(figsize=(8, 0.8 + 0.28 * sum(len(group) + 0.8 for group in groups.values())), layout="constrained")
    axes = figure.subplots()
    y, ticks = 0.0, []
    for (model, workload), group in groups.items():
        slowest = max(r["seconds"] for r in group.values())
        present = [engine for engine in engines if engine in group]
        ticks.append((y + (len(present) - 1) / 2, workload if len(models) == 1 else f"{model}\n{workload}"))
        floors = [r["floor"] for r in group.values() if "floor" in r]
        if floors:
            axes.vlines(
                floors[0] / slowest, y - 0.5, y + len(present) - 0.5, color="black", label="floor of the hardware"
            )
        for engine in present:
            seconds = group[engine]["seconds"]
            axes.barh(y, seconds / slowest, 0.9, color=colors[engine], label=engine)
            axes.text(seconds / slowest + 0.01, y, f"{seconds:.{2 if seconds < 10 else 1}f} s", va="center")
            y += 1
        y += 0.8
    axes.set_yticks([position for position, _ in ticks], [label for _, label in ticks])
    axes.tick_params(left=False)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1.1)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"{models.pop() if len(models) == 1 else 'Workloads'}, seconds: shorter is better", loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=len(handles), frameon=False)
    # text stays text, and the same results give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanovllm"}):
        figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    names = list(workloads(1, 1, 1, 0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["bench"], help=f"any of {', '.join(names)}, or 'all'")
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a folder, or with dummy weights {', '.join(SHAPES)}")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--engine", default="nanovllm", help=f"any of {', '.join(ENGINES)}, separated by commas")
    parser.add_argument("--seqs", type=float, default=1.0, help="scale of the number of sequences")
    parser.add_argument("--length", type=float, default=1.0, help="scale of all lengths")
    parser.add_argument("--input-len", type=int, help="with --output-len and --num-seqs: one workload of these sizes")
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--num-seqs", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="calls after the first; the best one counts")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "flash_attn", "triton", "torch"])
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw the runs of nanovllm over time there, as a PNG")
    parser.add_argument(
        "--figure", nargs="+", metavar="FILE", help="run nothing: draw to FILE what --json has written to the others"
    )
    args = parser.parse_args()
    engines = args.engine.split(",")
    for engine in engines:
        if engine not in ENGINES:
            parser.error(f"--engine {engine}: must be any of {', '.join(ENGINES)}, separated by commas")
        if find_spec(engine) is None:
            parser.error(f"--engine {engine}: {engine} is not installed")
    if (args.plot or args.figure) and find_spec("matplotlib") is None:
        parser.error("pictures need matplotlib: pip install 'nanovllm[plot]'")
    if args.plot and "nanovllm" not in engines:
        parser.error("--plot draws runs of nanovllm: --engine must name it")
    for name in ("seqs", "length", "input_len", "output_len", "num_seqs"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"argument --{name.replace('_', '-')}: {value}: must be greater than 0")
    if args.repeats < 0:
        parser.error(f"--repeats {args.repeats}: must be at least 0")
    for file in (args.json, args.plot):  # not only after all runs
        if file and not Path(file).parent.is_dir():
            parser.error(f"{file}: there is no such folder")
    if args.figure:
        if len(args.figure) == 1:
            parser.error("--figure needs the file to draw and at least one of results")
        draw_results([r for file in args.figure[1:] for r in json.loads(Path(file).read_text())], args.figure[0])
        return
    with TemporaryDirectory() as folder:
        model = os.path.expanduser(args.model)
        if model in SHAPES:
            args.load_format = "dummy"
            model = folder
            Path(folder, "config.json").write_text(json.dumps({**COMMON, **SHAPES[args.model]}))
        if not Path(model, "config.json").is_file():
            parser.error(f"--model {model}: must be a folder with a config.json, or any of {', '.join(SHAPES)}")
        config = json.loads(Path(model, "config.json").read_text())
        vocab = min(10000, config["vocab_size"] - 1)
        max_model_len = min(args.max_model_len, config["max_position_embeddings"])
        table = workloads(args.seqs, args.length, vocab, args.seed)
        if not args.input_len and (args.num_seqs or args.output_len):
            parser.error("--num-seqs and --output-len describe a workload of its own: they need --input-len")
        if args.input_len:
            i, o = args.input_len, args.output_len or args.input_len
            table = {f"{i}->{o}": lambda: uniform(args.num_seqs or 1, (i, i), (o, o), vocab, args.seed, 512)}
            args.workloads = list(table)
        chosen = names if args.workloads == ["all"] else args.workloads
        if unknown := [name for name in chosen if name not in table]:
            parser.error(f"unknown workload {unknown[0]!r}: must be any of {', '.join(table)}, or 'all'")
        works = {name: table[name]() for name in chosen}
        for name, work in works.items():
            longest = max(len(prompt) + n for prompt, n in zip(work.prompts, work.outputs))
            if longest > max_model_len:  # completions would be cut off, and the times those of less work
                parser.error(f"{name} needs {longest} tokens: must be at most {max_model_len}, see --max-model-len")
        results, runs = [], {}
        heads = ("seconds", "first", "out tok/s", "prefill tok/s")
        print(f"{'workload':<12} {'engine':<13} {heads[0]:>8} {heads[1]:>8} {heads[2]:>10} {heads[3]:>14} floor")
        for name, work in works.items():
            for engine in engines:
                print(f"{name} on {engine} ...", end="\r", file=sys.stderr, flush=True)  # may take minutes on a CPU
                r = ENGINES[engine](work, args, model)
                if samples := r.pop("samples", None):
                    runs[name] = samples
                results.append({"workload": name, "engine": engine, "model": args.model, **r})
                share = f"{r['floor']:.2f} s ({r['floor'] / r['seconds']:.0%})" if "floor" in r else "-"
                prefill = f"{r['prefill_tok_s']:>14.0f}" if "prefill_tok_s" in r else f"{'-':>14}"
                print(
                    f"{name:<12} {engine:<13} {r['seconds']:>8.3f} {r['first_call']:>8.3f} {r['output_tok_s']:>10.0f} "
                    f"{prefill} {share}",
                    flush=True,
                )
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1))
        if args.plot:
            draw_runs(runs, args.plot)


if __name__ == "__main__":
    main()
