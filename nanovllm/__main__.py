"""`python -m nanovllm run`: a file of requests to a file of results; `chat`: a conversation in the terminal.

It knows nothing of the engine but what scripts use. Invariant of `run`: a result is one line that begins with the
index and a hash of its input line, so the complete lines of the output are all that a restart has to know.
"""

import argparse
import fcntl
import inspect
import json
import re
import sys
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, BinaryIO, get_args, get_type_hints
from zlib import crc32

from tqdm.auto import tqdm

from nanovllm import LLM, OutOfMemoryError, SamplingParams
from nanovllm.config import Config
from nanovllm.sampling_params import ids_from_text

Json = dict[str, Any]  # an object

_RESULT = re.compile(rb'\{"index": (\d+), "line_hash": (\d+), "')
_RESULT_KEYS = {
    "index", "line_hash", "error", "text", "token_ids", "finish_reason", "stop_reason", "num_cached_tokens",
    "cumulative_logprob", "samples",
}  # fmt: skip
_OPTIONS = {f.name for f in fields(Config) if f.init} - {"model"}
_SAMPLING = {f.name for f in fields(SamplingParams)}
_INPUT_KEYS = {"prompt", "messages", "chat_template_kwargs"} | _SAMPLING


def run(args: argparse.Namespace, options: Json, sampling: SamplingParams) -> None:
    """Run every line of INPUT and append its result to OUTPUT as soon as it has ended. Started again after a
    crash, with the same arguments, it goes on where it stopped. To run a line again, delete its result. An OUTPUT
    with results of other lines, or that another run is writing, is refused.

    An input line is a JSON object: "prompt" (a string or token ids) or "messages" (and "chat_template_kwargs"),
    fields of SamplingParams, and anything else, which is copied to the result. So a misspelled field is not
    noticed: it is taken for something to copy. A result holds "index", the number of its input line from 0,
    "line_hash", the CRC-32 of that line without white space at its ends, and what an output of `generate` holds
    ("text", "token_ids", "finish_reason", ...), or "error" if the line could not be run. A line without a seed gets
    one made of --seed and its index: a restart does not change results. The exit status is 0 also with errors in
    lines; how many is said at the end.
    """
    Config(args.model, **options)  # a wrong one leaves no empty OUTPUT
    with open(args.input, "rb") as lines, open(args.output, "a+b") as results:
        if not lines.seekable():
            raise ValueError(f"{args.input}: must be a file, no pipe: it is read twice")
        try:
            fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{args.output}: another run is writing to it") from None
        except OSError:  # some network file systems have no locks
            pass
        hashes, done = array("I"), bytearray()
        for line in lines:
            hashes.append(crc32(line.strip()))
            done.append(not line.strip())  # blank lines need no result
        restore(results, hashes, done)
        if all(done):
            print(f"{args.output} is complete", file=sys.stderr)
            return
        lines.seek(0)
        numbered = enumerate(zip(lines, hashes, done))
        todo = (({"index": i, "line_hash": key}, line) for i, (line, key, is_done) in numbered if not is_done)
        num_errors = 0
        with LLM(args.model, **options) as llm, tqdm(total=len(done), initial=sum(done), unit="line") as bar:
            for batch in answer(llm, todo, sampling, args.chat_template_kwargs):
                for result in batch:
                    results.write(json.dumps(result).encode() + b"\n")
                    num_errors += "error" in result
                results.flush()
                bar.set_postfix_str(f"{num_errors} errors" if num_errors else "", refresh=False)
                bar.update(len(batch))
        if num_errors:
            print(f"{num_errors} of {len(done)} lines have an error, see {args.output}", file=sys.stderr)


def restore(results: BinaryIO, hashes: "array[int]", done: bytearray) -> None:
    """Mark the lines that have a result and cut off a last one that a crash left half written.

    `ValueError` if there is anything but results of lines with these hashes.
    """
    results.seek(0)
    end = 0
    for number, line in enumerate(results, 1):
        if not line.endswith(b"\n") and b'{"index": '.startswith(line[:10]):
            break
        match = _RESULT.match(line)
        if not match or (index := int(match[1])) >= len(hashes) or int(match[2]) != hashes[index]:
            advice = "give another OUTPUT, or delete the results of lines that have changed"
            raise ValueError(f"{results.name}: line {number} is no result of this INPUT; {advice}")
        done[index] = True
        end += len(line)
    results.truncate(end)


def answer(
    llm: LLM, todo: Iterator[tuple[Json, bytes]], sampling: SamplingParams, template_kwargs: Json
) -> Iterator[list[Json]]:
    """After each step the results that are new, of `todo`: how a result begins, and its line.

    The engine holds the requests that can run and about as many that wait, never the whole file.
    """
    added: dict[int, Json] = {}  # by `seq_id`
    entry: tuple[Json, bytes] | None = ({}, b"")
    while entry or added:
        batch: list[Json] = []
        while len(added) + len(batch) < 2 * llm.config.max_num_seqs and (entry := next(todo, None)):
            result, line = entry
            try:
                params = replace(sampling, seed=hash((llm.config.seed, result["index"])))
                added[add_line(llm, line, result, params, template_kwargs)] = result
            except Exception as error:  # tokenizers and chat templates raise what they like
                batch.append({**result, "error": f"{type(error).__name__}: {error}"})
        for output in llm.step():
            result = added.pop(output["seq_id"])
            for part in (output, *output.get("samples", ())):
                del part["seq_id"], part["prompt_token_ids"]
            batch.append({**result, **output})
        yield batch


def add_line(llm: LLM, line: bytes, result: Json, params: SamplingParams, template_kwargs: Json) -> int:
    """Add the request of a line and return its `seq_id`; what is to be copied goes to `result`."""
    item = json_object(line)
    result.update({key: value for key, value in item.items() if key not in _INPUT_KEYS | _RESULT_KEYS})
    if taken := item.keys() & _RESULT_KEYS:
        raise ValueError(f"{', '.join(sorted(taken))}: cannot be copied, the result has this key itself")
    if ("prompt" in item) == ("messages" in item):
        raise ValueError("must have either 'prompt' or 'messages'")
    if "messages" in item:
        options = template_kwargs | item.get("chat_template_kwargs", {})
        [item["prompt"]] = llm.chat_prompts([item["messages"]], options)
    given = {name: item[name] for name in _SAMPLING & item.keys() if (name, item[name]) != ("seed", None)}
    if isinstance(bias := given.get("logit_bias"), dict):
        given["logit_bias"] = ids_from_text(bias)
    return llm.add_request(item["prompt"], replace(params, **given))


def json_object(text: str | bytes) -> Json:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r}: must be a JSON object")
    return value


def chat(args: argparse.Namespace, options: Json, sampling: SamplingParams) -> None:
    """Talk with a model in the terminal: Ctrl-C stops an answer, Ctrl-D ends."""
    with suppress(ImportError):
        import readline  # noqa: F401, `input` gets its line editing
    messages: list[Json] = []
    with LLM(args.model, **options) as llm:
        while True:
            try:
                if not (question := input("> ").strip()):
                    continue
                messages.append({"role": "user", "content": question})
                [prompt] = llm.chat_prompts([messages], args.chat_template_kwargs)
                messages.append({"role": "assistant", "content": ""})
                for piece in llm.stream(prompt, sampling):
                    messages[-1]["content"] += piece["text"]
                    print(piece["text"], end="", flush=True)
            except KeyboardInterrupt:
                pass
            except EOFError:
                return print()
            except ValueError as error:
                print(f"{error}; the conversation starts anew", end="")
                messages.clear()
            print()


def add_flags(parser: argparse.ArgumentParser, title: str, kind: Any, names: set[str]) -> None:
    """A typed flag for each of these fields of a dataclass that one word can fill."""
    group, hints = parser.add_argument_group(title), get_type_hints(kind)
    for f in fields(kind):
        types = [t for t in get_args(hints[f.name]) or (hints[f.name],) if t in (bool, int, float, str)]
        if f.name in names and types:
            how: dict[str, Any] = {"type": types[0], "metavar": types[0].__name__.upper()}
            if types[0] is bool:
                how = {"action": argparse.BooleanOptionalAction}
            flag = "--" + f.name.replace("_", "-")
            group.add_argument(flag, default=f.default, help="default %(default)s", **how)


def main() -> None:
    parser = argparse.ArgumentParser("python -m nanovllm", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="run | chat")
    for function in (run, chat):
        command = commands.add_parser(
            function.__name__, description=inspect.getdoc(function), allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if function is run:
            command.add_argument("input", metavar="INPUT")
            command.add_argument("output", metavar="OUTPUT")
            command.add_argument("--model", required=True, help="a folder")
        else:
            command.add_argument("model", metavar="MODEL", help="a folder")
        example = """such as '{"enable_thinking": false}'"""
        command.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=example)
        add_flags(command, "engine options", Config, _OPTIONS)
        # --seed is the engine's: one for all requests would give equal prompts equal answers
        add_flags(command, "defaults of sampling", SamplingParams, _SAMPLING - _OPTIONS)
        command.set_defaults(function=function)
    command.set_defaults(max_tokens=None)  # of chat
    args = parser.parse_args()
    options = {name: value for name, value in vars(args).items() if name in _OPTIONS}
    sampling = {name: value for name, value in vars(args).items() if name in _SAMPLING - _OPTIONS}
    try:
        args.function(args, options, SamplingParams(**sampling))
    except (OSError, ValueError, OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
