# ruff: noqa: E402 (after the check for ray)
"""Ray Data: every row gets its answer once, whatever happens to an engine or to another row."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs nanovllm[ray]")

import pyarrow as pa
import pyarrow.parquet as pq

import nanovllm.ray
from nanovllm import LLM, EngineError, SamplingParams
from nanovllm.ray import LLMActor, generate

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "max_num_seqs": 16, "kvcache_block_size": 16, "num_kvcache_blocks": 200,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8)
IDS_ONLY = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a local Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", str(ROOT))  # of its workers
        settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init(num_cpus=2, object_store_memory=100 << 20, **settings)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def make_rows(n: int = 500) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {"id": i, "prompt": [rng.randrange(2, 1000) for _ in range(rng.randint(2, 30))], "max_tokens": 1 + i % 12}
        for i in range(n)
    ]


def expected(model: str, rows: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"]) for row in rows]
    with LLM(model, **OPTIONS) as llm:
        outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    return [(row["id"], output["token_ids"]) for row, output in zip(rows, outputs)]


def answers(rows: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return sorted((row["id"], list(row["token_ids"])) for row in rows if row["error"] is None)


def test_the_script_of_the_readme_answers_as_one_call_of_generate(
    cluster: str, tiny_model: str, tmp_path: Path
) -> None:
    script = re.search(r"<!-- ray script -->\s*```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert script
    (tmp_path / "batch.py").write_text(script[1], "utf-8")
    rows = [{**row, "id": f"{row['id']:03}"} for row in make_rows()]  # text that looks like a number
    bad = {"id": "500", "prompt": [5], "max_tokens": None, "temperature": -1}  # so others have no temperature
    source, target = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad]), "utf-8")
    options = f"--num-engines 2 --device cpu --address {cluster}"
    command = [sys.executable, "batch.py", tiny_model, str(source), str(target), *options.split()]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    results = pq.read_table(target).to_pylist()
    assert answers(results) == expected(tiny_model, rows)
    assert [(row["id"], row["error"]) for row in results if row["error"]] == [
        ("500", "SamplingParams.temperature=-1: must be a finite number >= 0")
    ]


def test_a_killed_engine_and_a_bad_row_cost_no_other_row(
    cluster: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(LLMActor):  # local, so that Ray sends its code to processes that cannot import this file
        """Kills its process in the middle of a step when it has done half of its share, if no other has done so."""

        def __init__(self, *args: Any, mark: str, **options: Any) -> None:
            super().__init__(*args, **options)
            step = self.llm.step

            def step_or_die() -> list[dict[str, Any]]:
                if self.llm.stats()["generated_tokens"] > 800 and not Path(mark).exists():
                    Path(mark).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                return step()

            self.llm.step = step_or_die  # type: ignore[method-assign]

    monkeypatch.setattr(nanovllm.ray, "LLMActor", Mortal)
    rows, mark = make_rows(), tmp_path / "killed"
    bad = rows.pop(77)
    ds = ray.data.from_items([*rows, {**bad, "prompt": [5, 10**9]}])
    results = generate(ds, tiny_model, IDS_ONLY, num_engines=2, batch_size=25, mark=str(mark), **OPTIONS).take_all()
    assert mark.exists()
    assert len(results) == 500
    assert answers(results) == expected(tiny_model, rows)
    [refused] = [row for row in results if row["error"] is not None]
    assert (refused["id"], refused["token_ids"], refused["text"]) == (77, None, None)
    assert refused["error"] == "prompt holds token id 1000000000: must be in 0..1023"


def test_sorted_rows_find_their_prefix_in_the_cache(cluster: str, tiny_model: str) -> None:
    rng = random.Random(0)
    prefixes = [[rng.randrange(2, 1000) for _ in range(64)] for _ in range(16)]
    rows = [{"document": i % 16, "prompt": [*prefixes[i % 16], 2 + i]} for i in range(256)]
    ds = ray.data.from_items(rows).sort("document")
    # a cache for two prefixes or so; a group of 16 lies in two batches at most
    options = {**OPTIONS, "max_num_seqs": 4, "num_kvcache_blocks": 24}
    results = generate(ds, tiny_model, IDS_ONLY, num_engines=2, batch_size=32, **options).take_all()
    assert len(results) == 256
    assert sum(row["num_cached_tokens"] for row in results) >= 64 * (256 - 2 * 16)


# One actor, without Ray


@pytest.fixture(scope="module")
def actor(tiny_model: str) -> Iterator[LLMActor]:
    actor = LLMActor(tiny_model, GREEDY, **OPTIONS)
    yield actor
    actor.llm.exit()


def call(actor: LLMActor, rows: list[dict[str, Any]], *more: list[dict[str, Any]]) -> list[Any]:
    """The rows of each result; calls run at the same time."""

    async def calls() -> list[Any]:
        tables = [pa.Table.from_pylist(part) for part in (rows, *more)]
        return await asyncio.gather(*map(actor, tables), return_exceptions=True)

    return [result.to_pylist() if isinstance(result, pa.Table) else result for result in asyncio.run(calls())]


def test_prompts_conversations_and_sampling_columns(actor: LLMActor) -> None:
    chat = [{"role": "user", "content": "introduce yourself"}]
    [results] = call(
        actor,
        [
            {"prompt": "Hello", "messages": None, "max_tokens": 3, "note": {"a": 1}},
            {"prompt": None, "messages": chat, "max_tokens": None, "note": None},
            {"prompt": "Hello", "messages": chat, "max_tokens": 3, "note": None},
            {"prompt": None, "messages": None, "max_tokens": 3, "note": None},
            {"prompt": "Hello", "messages": None, "max_tokens": 0, "note": None},
            {"prompt": "", "messages": None, "max_tokens": 3, "note": None},
        ],
    )
    [plain] = actor.llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    [conversation] = actor.llm.chat(chat, GREEDY, use_tqdm=False)
    keys = {"text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids", "num_cached_tokens", "seq_id"}
    assert set(results[0]) == keys | {"prompt", "messages", "max_tokens", "note", "error"}
    assert (results[0]["text"], results[0]["note"]) == (plain["text"], {"a": 1})
    assert results[1]["token_ids"] == conversation["token_ids"]
    errors = [row["error"] for row in results]
    assert errors[:4] == [None, None, *["a row needs a `prompt` or `messages`, and not both"] * 2]
    assert "max_tokens=0" in errors[4]
    assert "prompt is empty" in errors[5]


def test_integers_that_pandas_has_made_floats_of_are_taken(actor: LLMActor) -> None:
    whole, odd = {"prompt": "Hello", "max_tokens": 3.0, "top_k": 5.0, "seed": 7.0}, {"prompt": "Hello", "top_k": 1.5}
    [[answered, refused]] = call(actor, [whole, {**dict.fromkeys(whole), **odd}])
    assert answered["error"] is None and len(answered["token_ids"]) == 3
    assert "SamplingParams.top_k=1.5: must be an integer" in refused["error"]


def test_a_logit_bias_is_an_object_or_a_map_of_arrow(actor: LLMActor) -> None:
    prompts, biases = [[5, 6], [5, 6], [5, 6]], [{7: 1000.0}, {8: 1000.0, 9: 0.5}, None]
    as_map = pa.array([bias and list(bias.items()) for bias in biases], pa.map_(pa.int32(), pa.float64()))
    as_object = pa.array([bias and {str(key): value for key, value in bias.items()} for bias in biases])
    [[*_, plain]] = call(actor, [{"prompt": [5, 6]}])
    for column in (as_map, as_object):
        results = asyncio.run(actor(pa.table({"prompt": prompts, "logit_bias": column}))).to_pylist()
        assert [set(row["token_ids"]) for row in results[:2]] == [{7}, {8}]
        assert results[2]["token_ids"] == plain["token_ids"]
    for bias in ({"seven": 1.0}, [7, 8], "7"):
        [[refused]] = call(actor, [{"prompt": [5, 6], "logit_bias": bias}])
        assert f"SamplingParams.logit_bias={bias!r}: must be a dict" in refused["error"]


def test_samples_and_log_probabilities_are_columns_where_a_row_asks_for_them(actor: LLMActor) -> None:
    asked = {"n": 3, "logprobs": 2, "max_tokens": 4, "seed": 5, "temperature": 1.0}
    [[row, plain]] = call(actor, [{"prompt": [5, 6], **asked}, {"prompt": [5, 6], **dict.fromkeys(asked)}])
    [output] = actor.llm.generate([[5, 6]], SamplingParams(**asked), use_tqdm=False)
    assert [sample["token_ids"] for sample in row["samples"]] == [s["token_ids"] for s in output["samples"]]
    assert [dict(entry) for entry in row["logprobs"]] == [pytest.approx(e, abs=1e-4) for e in output["logprobs"]]
    assert (plain["samples"], plain["logprobs"]) == (None, None)


def test_a_block_has_the_same_schema_whatever_its_rows_are(actor: LLMActor) -> None:
    def schema(prompt: list[int], stop: list[int]) -> pa.Schema:
        table = pa.Table.from_pylist([{"prompt": prompt, "stop_token_ids": stop}])
        return asyncio.run(actor(table)).schema

    [[answer]] = call(actor, [{"prompt": [5, 6]}])
    [[stopped]] = call(actor, [{"prompt": [5, 6], "stop_token_ids": answer["token_ids"][:1]}])
    assert stopped["stop_reason"] == str(answer["token_ids"][0])
    assert schema([5], [1]) == schema([10**9], [1]) == schema([5, 6], answer["token_ids"][:1])


def test_a_column_with_the_name_of_an_output_is_not_overwritten(actor: LLMActor) -> None:
    [error] = call(actor, [{"prompt": "Hello", "text": "mine"}])
    assert isinstance(error, ValueError)
    assert "columns text are names of outputs" in str(error)


def test_batches_share_the_engine_and_its_failure(actor: LLMActor, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**row, "max_tokens": 40} for row in make_rows(16)]
    first, second = rows[:4], rows[4:]
    steps = actor.llm.stats()["steps"]
    apart = [call(actor, rows)[0] for rows in (first, second)]
    steps_apart = actor.llm.stats()["steps"] - steps
    together = call(actor, first, second)
    assert [answers(rows) for rows in together] == [answers(rows) for rows in apart]
    assert actor.llm.stats()["steps"] - steps - steps_apart < 0.75 * steps_apart

    def fail(batch: Any) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(actor.llm.runner, "launch", fail)
        errors = call(actor, first, second)
    assert {str(error) for error in errors} <= {"device lost", "a step of another batch has failed"}
    assert all(isinstance(error, (RuntimeError, EngineError)) for error in errors)
    assert answers(call(actor, first)[0]) == answers(apart[0])


def test_engines_without_a_seed_do_not_repeat_one_another(tiny_model: str) -> None:
    rows = [{"prompt": [5, 6, 7], "temperature": 1.5, "max_tokens": 12}]
    texts = set()
    for _ in range(3):
        actor = LLMActor(tiny_model, **OPTIONS)
        texts.add(call(actor, rows)[0][0]["text"])
        actor.llm.exit()
    assert len(texts) > 1
