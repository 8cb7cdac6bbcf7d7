"""bench.py: its workloads on several engines in one table, and the pictures; example.py: its stream."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402
import example  # noqa: E402


@pytest.fixture
def run_bench(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*flags: str, output_len: int = 6) -> None:
        sizes = ["--num-seqs", "4", "--input-len", "24", "--output-len", str(output_len)]
        monkeypatch.setattr(sys, "argv", ["bench.py", *sizes, "--model", tiny_model, "--device", "cpu", *flags])
        bench.main()

    return run


def colors(file: Path) -> dict[str, int]:
    """How many pixels of a PNG have each color."""
    from matplotlib.image import imread
    from numpy import unique

    pixels = (imread(file)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    return {f"#{color:06x}": int(count) for color, count in zip(*unique(pixels, return_counts=True))}


def test_engines_run_the_same_workload_and_are_printed_in_one_table(
    run_bench: Any, tmp_path: Path, capsys: Any
) -> None:
    engines = ("--engine", "nanovllm,transformers")
    run_bench(*engines, "24->6", "--json", str(tmp_path / "results.json"))  # a workload after the engines
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["engine"] for r in results] == ["nanovllm", "transformers"]
    for r in results:
        assert r["workload"] == "24->6"
        assert r["output_tok_s"] * r["seconds"] == pytest.approx(24)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["24->6", "nanovllm"], ["24->6", "transformers"]]


def test_a_workload_of_one_step_has_a_prefill_speed(run_bench: Any, tmp_path: Path) -> None:
    run_bench("--json", str(tmp_path / "results.json"), output_len=1)
    [result] = json.loads((tmp_path / "results.json").read_text())
    assert result["steps"] == 1 and result["prefill_tok_s"] * result["seconds"] == pytest.approx(4 * 24)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "-1"], "--repeats -1: must be at least 0"),
        (["--json", "/no/results.json"], "/no/results.json: there is no such folder"),
        (["--plot", "/no/run.png"], "/no/run.png: there is no such folder"),
        (["--seqs", "nan"], "--seqs: nan: must be greater than 0"),
        (["--length", "x"], "--length: invalid float value: 'x'"),
        (["--input-len", "0"], "--input-len: 0: must be greater than 0"),
        (["--max-model-len", "29"], "24->6 needs 30 tokens: must be at most 29"),
    ],
)
def test_bench_refuses_what_it_could_not_run_or_write_before_any_run(
    run_bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], message: str
) -> None:
    monkeypatch.setitem(bench.ENGINES, "nanovllm", None)
    with pytest.raises(SystemExit):
        run_bench(*flags)
    assert message in capsys.readouterr().err


def test_all_workloads_are_checked_before_the_first_runs(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(bench.ENGINES, "nanovllm", None)
    flags = ["latency", "batch16", "--model", tiny_model, "--seqs", "0.1", "--max-model-len", "700"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit):
        bench.main()
    assert "batch16 needs 1024 tokens: must be at most 700" in capsys.readouterr().err


def test_a_peer_is_given_the_workload_through_its_public_interface(
    run_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Engine:
        def __init__(self, model: str, **options: Any) -> None:
            calls.append(options)

        def reset_prefix_cache(self) -> None:
            calls.append("reset")

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> None:
            calls.append((prompts, params))

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, dict  # type: ignore[attr-defined]
    module.__spec__ = json.__spec__
    monkeypatch.setitem(sys.modules, "vllm", module)
    run_bench("--engine", "vllm", "--max-num-seqs", "3", "--json", str(tmp_path / "results.json"))
    options, *rest = calls
    assert (options["max_num_seqs"], options["skip_tokenizer_init"]) == (3, True)
    assert rest[::2] == ["reset", "reset"] and rest[1] == rest[3]
    prompts, params = rest[1]
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [24] * 4
    assert [p["max_tokens"] for p in params] == [6] * 4 and all(p["ignore_eos"] for p in params)


def test_the_plot_of_a_run_shows_all_five_quantities(run_bench: Any, tmp_path: Path) -> None:
    samples = []
    for i in range(60):  # 20 seconds, 3 preemptions
        stats = {
            "num_running": min(i, 8), "num_waiting": 60 - i, "prompt_tokens": 100 * min(i, 30),
            "cached_prompt_tokens": 10 * min(i, 30), "generated_tokens": 8 * i, "num_kvcache_blocks": 40,
            "num_free_blocks": 40 - i // 2, "preemptions": i // 20,
        }  # fmt: skip
        samples.append((i / 3, stats))
    bench.draw_runs({"one": samples, "two": samples[:9]}, str(tmp_path / "made.png"))
    found = colors(tmp_path / "made.png")
    # gray, blue, orange, green, red of matplotlib's palette
    for color in ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"):
        assert found.get(color, 0) > 500, color
    run_bench("--plot", str(tmp_path / "run.png"))
    assert colors(tmp_path / "run.png")["#1f77b4"] > 500


def test_the_figure_has_a_bar_for_every_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [
        {"workload": w, "engine": "nanovllm", "model": "m", "seconds": s, "floor": 0.5} for w, s in (("a", 1), ("b", 2))
    ]
    peers = [{"workload": "a", "engine": "peer", "model": "m", "seconds": 4}]
    files = [tmp_path / "ours.json", tmp_path / "peers.json"]
    for file, results in zip(files, (ours, peers)):
        file.write_text(json.dumps(results))
    for name in ("figure.png", "figure.svg", "again.svg"):
        monkeypatch.setattr(sys, "argv", ["bench.py", "--figure", str(tmp_path / name), *map(str, files)])
        bench.main()
    found = colors(tmp_path / "figure.png")
    # bars of 1/4 and 1 of the width against one of 1
    assert found["#2563eb"] / found["#a3aab5"] == pytest.approx(1.25, rel=0.1)
    svg = (tmp_path / "figure.svg").read_text()
    for text in (">nanovllm<", ">peer<", ">a<", ">b<", ">1.00 s<", ">4.00 s<", ">floor of the hardware<"):
        assert text in svg
    assert svg == (tmp_path / "again.svg").read_text()


def test_the_figure_in_the_readme_is_that_of_its_results(tmp_path: Path) -> None:
    results = [r for name in ("nanovllm", "vllm") for r in json.loads((ROOT / f"assets/{name}.json").read_text())]
    svg = (ROOT / "assets/speed.svg").read_text()
    for r in results:
        assert f">{r['seconds']:.{2 if r['seconds'] < 10 else 1}f} s<" in svg, r


@pytest.mark.parametrize(
    ("missing", "flags", "message"),
    [
        ("vllm", ["--engine", "vllm"], "vllm is not installed"),
        ("", ["--engine", "bench"], "--engine bench: must be any of nanovllm, transformers, vllm"),
        ("matplotlib", ["--plot", "run.png"], "pip install 'nanovllm[plot]'"),
        ("matplotlib", ["--figure", "a.svg", "b.json"], "pip install 'nanovllm[plot]'"),
        ("", ["--engine", "transformers", "--plot", "run.png"], "--engine must name it"),
    ],
)
def test_what_is_not_installed_is_said_before_anything_runs(
    run_bench: Any, missing: str, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    find_spec = bench.find_spec
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(SystemExit):
        run_bench(*flags)
    assert message in capsys.readouterr().err


def test_the_example_streams_what_it_prints_otherwise(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    texts = []
    for flags in ([], ["--stream"]):
        monkeypatch.setattr(sys, "argv", ["example.py", "--device", "cpu", "--question", "Who are you?", *flags])
        example.main()
        texts.append(capsys.readouterr().out)
    assert "trained from scratch" in texts[0] and texts[0] == texts[1]
