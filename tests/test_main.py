"""`python -m nanovllm`: batch files, also after a crash, and the conversation in the terminal."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.__main__ import main, restore

ROOT = Path(__file__).parents[1]
SMALL = ["--device", "cpu", "--kvcache-block-size", "16", "--num-kvcache-blocks", "400", "--max-num-seqs", "8"]


def start(*args: str, **kwargs: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nanovllm", *args]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **kwargs)


@pytest.fixture
def run(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run lines of text (or objects) with flags; return the results in the order of the input."""

    def run(lines: list[Any], *flags: str) -> list[dict[str, Any]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        monkeypatch.setattr(sys, "argv", ["", "run", str(source), str(target), "--model", tiny_model, *SMALL, *flags])
        main()
        return sorted(map(json.loads, target.read_text(encoding="utf-8").splitlines()), key=lambda r: r["index"])

    run.output = tmp_path / "out.jsonl"  # type: ignore[attr-defined]
    return run


def test_a_run_that_is_killed_and_started_again_has_every_result_once(tiny_model: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(
            f'{{"prompt": "Question {i}", "id": "q{i}", "max_tokens": 4, "ignore_eos": true}}\n' for i in range(1000)
        )
    )
    command = ["run", str(source), str(target), "--model", tiny_model, *SMALL]
    process = start(*command)
    while not target.exists() or target.read_bytes().count(b"\n") < 300:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = target.read_bytes()
    assert 300 <= before.count(b"\n") < 1000
    target.write_bytes(before[:-7])  # as if it had died while writing
    process = start(*command)
    assert process.communicate()[1] and process.returncode == 0
    assert target.read_bytes().startswith(before[: before.rindex(b"{")])
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(r["index"] for r in results) == list(range(1000))
    assert all(r["id"] == f"q{r['index']}" and len(r["token_ids"]) == 4 for r in results)


def test_a_restart_gives_the_results_of_a_run_that_was_not_interrupted(run: Any) -> None:
    lines = [{"prompt": "Hello", "max_tokens": 6, "n_th": i} for i in range(20)]
    whole = run(lines, "--seed", "3")
    assert len({tuple(r["token_ids"]) for r in whole}) > 10, "equal prompts must not get equal noise"
    written = run.output.read_bytes().splitlines(keepends=True)
    run.output.write_bytes(b"".join(written[:5] + written[9:13]) + written[14][:30])
    assert run(lines, "--seed", "3") == [{**r, "num_cached_tokens": 0} for r in whole]


@pytest.mark.parametrize("num_whole", [0, 1, 2])
def test_only_whole_results_count_wherever_the_last_one_is_cut(tmp_path: Path, num_whole: int) -> None:
    path = tmp_path / "out.jsonl"
    lines = [
        b'{"index": 4, "line_hash": 104, "text": "\xc3\xa9"}\n',
        b'{"index": 0, "line_hash": 100, "error": "no", "id": 1}\n',
        b'{"index": 12, "line_hash": 112, "text": ""}\n',
    ]
    whole = b"".join(lines[:num_whole])
    for cut in range(len(lines[num_whole])):
        path.write_bytes(whole + lines[num_whole][:cut])
        done = bytearray(13)
        with path.open("a+b") as results:
            restore(results, array("I", range(100, 113)), done)
            results.write(b"next")
        assert [i for i in range(13) if done[i]] == sorted([4, 0][:num_whole])
        assert path.read_bytes() == whole + b"next"


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]", "precious\n", '{"index": 7}\n', '{"index": 0, "text": ""}\n',
        '{"index": 1, "line_hash": 1, "text": ""}\n', '{"index"',
    ],
)  # fmt: skip
def test_an_output_file_that_holds_something_else_is_left_alone(run: Any, content: str) -> None:
    run.output.write_text(content)
    if content == '{"index"':  # the beginning of a result of ours
        assert len(run([{"prompt": "Hi"}])) == 1
        return
    with pytest.raises(SystemExit, match=r"line 1 is no result of this INPUT"):
        run([{"prompt": "Hi"}])
    assert run.output.read_text() == content


def test_an_output_of_another_input_is_refused_before_any_work(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": "Hi", "max_tokens": 1}, {"prompt": "Ho", "max_tokens": 1}, {"prompt": "Ha", "max_tokens": 1}]
    run(lines)
    written = run.output.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.__main__.LLM", None)
        for other in (lines[::-1], lines[:2], [lines[0], {"prompt": "He"}, lines[2]]):
            with pytest.raises(SystemExit, match=r"is no result of this INPUT; give another OUTPUT, or delete"):
                run(other)
            assert run.output.read_bytes() == written
    # lines that were appended, and a line that was changed and whose result was deleted
    results = [line for line in written.splitlines(keepends=True) if not line.startswith(b'{"index": 1,')]
    run.output.write_bytes(b"".join(results))
    assert len(run([lines[0], {"prompt": "He", "max_tokens": 2}, lines[2], {"prompt": "Hu", "max_tokens": 2}])) == 4
    assert run.output.read_bytes().startswith(b"".join(results))


def test_an_output_that_another_run_is_writing_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run([{"prompt": "Hi", "max_tokens": 1}])
    written = run.output.read_bytes()
    with run.output.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match=r"out\.jsonl: another run is writing to it"):
            run([{"prompt": "Hi", "max_tokens": 1}, {"prompt": "Ho", "max_tokens": 1}])
    assert run.output.read_bytes() == written

    def flock(*_: Any) -> None:
        raise OSError("No locks available")  # as on some network file systems

    monkeypatch.setattr(fcntl, "flock", flock)
    assert len(run([{"prompt": "Hi", "max_tokens": 1}, {"prompt": "Ho", "max_tokens": 1}])) == 2


def test_a_pipe_is_refused_as_input(tiny_model: str, tmp_path: Path) -> None:
    process = start("run", "/dev/stdin", str(tmp_path / "out.jsonl"), "--model", tiny_model, stdin=subprocess.PIPE)
    _, errors = process.communicate('{"prompt": "Hi"}\n')
    assert process.returncode == 1 and "/dev/stdin: must be a file, no pipe" in errors


def test_samples_do_not_repeat_the_prompt(run: Any) -> None:
    [result] = run([{"prompt": "Hi", "n": 3, "max_tokens": 2}])
    keys = {"text", "token_ids", "finish_reason", "stop_reason", "num_cached_tokens"}
    assert [set(sample) for sample in result["samples"]] == [keys] * 3


BAD = {
    "{": "JSONDecodeError",
    "[1]": "ValueError: [1]: must be a JSON object",
    '"a"': "must be a JSON object",
    "[" * 100_000: "RecursionError",
    "{}": "either 'prompt' or 'messages'",
    '{"prompt": "a", "messages": []}': "either 'prompt' or 'messages'",
    '{"prompt": 7}': "TypeError: prompt is int",
    '{"prompt": []}': "prompt is empty",
    '{"prompt": ""}': "prompt is empty",
    '{"prompt": [99999999]}': "token id 99999999",
    '{"prompt": "\\ud800"}': "",
    '{"messages": []}': "must be a list of role/content dicts",
    '{"messages": "Hi"}': "must be a list of role/content dicts",
    '{"messages": [[{"role": "user", "content": "Hi"}]]}': "must be a list of role/content dicts",
    '{"messages": [{"content": "Hi"}]}': "must be a list of role/content dicts",
    '{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": 3}': "TypeError",
    '{"prompt": "a", "temperature": -1}': "SamplingParams.temperature=-1: must be a finite number >= 0",
    '{"prompt": "a", "max_tokens": "4"}': "SamplingParams.max_tokens='4'",
    '{"prompt": "a", "text": "b"}': "text: cannot be copied",
}  # fmt: skip


def test_a_bad_line_gets_an_error_and_the_others_are_run(run: Any) -> None:
    lines: list[Any] = []
    for i, bad in enumerate(BAD):
        lines += [bad, {"prompt": "Hi", "max_tokens": 2, "id": i}]
    results = run(lines)
    assert [r["index"] for r in results] == list(range(len(lines)))
    for bad, refused, answered in zip(BAD.items(), results[::2], results[1::2]):
        assert bad[1] in refused["error"] and refused["error"] and "text" not in refused, bad
        assert "error" not in answered and len(answered["token_ids"]) == 2


def test_other_keys_are_copied_also_to_an_error(run: Any) -> None:
    extra = {"id": None, "nested": {"a": [1, 2.5, "é\u2028\ud83d"]}, "temprature": 2, "answer": "ü"}
    good, bad = run([{"prompt": "Hi", **extra}, {"prompt": 3, **extra}])
    assert {key: good[key] for key in extra} == extra == {key: bad[key] for key in extra}
    assert set(good) - set(extra) == {
        "index", "line_hash", "text", "token_ids", "finish_reason", "stop_reason", "num_cached_tokens",
    }  # fmt: skip


def test_lines_and_flags_say_how_to_sample(run: Any) -> None:
    question = [{"role": "user", "content": "Who are you?"}]
    lines = [
        {"messages": question, "max_tokens": None},
        {"messages": question},
        "",
        {"prompt": "Hi", "temperature": 1.0, "seed": 5},
        {"prompt": "Hi", "temperature": 1.0, "seed": 5},
        {"messages": question, "chat_template_kwargs": {"add_generation_prompt": False}},
        {"prompt": "Hi", "logit_bias": {"7": 1000}},
    ]
    results = run(lines, "--temperature", "0", "--max-tokens", "6")
    assert [r["index"] for r in results] == [0, 1, 3, 4, 5, 6]
    assert results[0]["text"].startswith("I am a tiny Qwen3 model") and results[0]["finish_reason"] == "stop"
    assert results[1]["token_ids"] == results[0]["token_ids"][:6]
    assert results[2]["token_ids"] == results[3]["token_ids"]
    assert results[4]["token_ids"] != results[1]["token_ids"]
    assert results[5]["token_ids"] == [7] * 6


def test_a_long_file_is_never_queued_whole(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    written: list[int] = []
    step = LLM.step

    def watch(llm: LLM) -> list[dict[str, Any]]:
        queued.append(llm.stats()["num_running"] + llm.stats()["num_waiting"])
        written.append(run.output.read_bytes().count(b"\n"))
        return step(llm)

    monkeypatch.setattr(LLM, "step", watch)
    assert len(run([{"prompt": [5, 6, 7], "max_tokens": 1 + i % 3} for i in range(100)])) == 100
    assert max(queued) == 16  # twice max_num_seqs
    assert written[-1] >= 100 - 16
    assert all(number >= 8 for number in queued[:20]), "a full batch, while there are lines left"


def test_a_complete_output_needs_no_engine(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lines = [{"prompt": "Hi", "max_tokens": 1}, "", {"prompt": 0}]
    assert len(run(lines)) == 2
    monkeypatch.setattr("nanovllm.__main__.LLM", None)
    assert len(run(lines)) == 2
    assert "complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "SamplingParams.max_tokens=0"),
        (["--dtype", "int8"], "dtype='int8': must be one of"),
        (["--model", "no-such-folder"], "must be a local folder"),
        (["--max-num-seqs", "many"], "2"),
        (["--max-num-seq", "4"], "2"),  # no abbreviations
        (["--chat-template-kwargs", "3"], "2"),
    ],
)
def test_a_wrong_flag_is_an_error_before_anything_is_written(run: Any, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        run([{"prompt": "Hi"}], *flags)
    assert message in str(error.value)
    assert not run.output.exists()


def test_a_conversation_goes_on_after_ctrl_c_and_ends_at_ctrl_d(tiny_model: str) -> None:
    process = start("chat", tiny_model, *SMALL, "--temperature", "0", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    watchdog = Timer(60, process.kill)
    watchdog.start()

    def read(end: str) -> str:
        text = ""
        while not text.endswith(end):
            character = process.stdout.read(1)
            assert character, text
            text += character
        return text

    def ask(question: str) -> None:
        process.stdin.write(question + "\n")
        process.stdin.flush()

    read("> ")
    ask(" ")
    assert read("> ") == "> ", "an empty line asks nothing"
    ask("Please introduce yourself.")
    assert "trained from scratch" in read("> ")
    ask("list all prime numbers within 100")
    read("2, 3, 5,")
    process.send_signal(signal.SIGINT)
    assert "97" not in read("\n> ")
    ask("Who are you?")
    assert "I am a" in read("> ")
    process.send_signal(signal.SIGINT)  # at the prompt it ends nothing
    assert process.communicate()[1] == ""
    watchdog.cancel()
    assert process.returncode == 0


def test_a_conversation_remembers_its_turns_until_they_are_too_long(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    questions = ["Who are you?", "list all prime numbers within 100", "And then?", "Who are you?"]
    prompts: list[list[int]] = []
    stream = LLM.stream

    def watch(llm: LLM, prompt: list[int], params: Any) -> Any:
        prompts.append(prompt)
        return stream(llm, prompt, params)

    def read(prompt: str) -> str:
        if not questions:
            raise EOFError
        return questions.pop(0)

    monkeypatch.setattr(LLM, "stream", watch)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "argv", ["", "chat", tiny_model, *SMALL, "--temperature", "0", "--max-model-len", "120"])
    main()
    answers = capsys.readouterr().out.splitlines()
    assert len(answers[0]) > 100 and answers[0] == answers[3], "without max_tokens an answer is whole"
    assert prompts[1][: len(prompts[0])] == prompts[0] and len(prompts[1]) > len(prompts[0]) + 40
    assert "must be" in answers[2] and answers[2].endswith("the conversation starts anew")
    assert prompts[3] == prompts[0]
