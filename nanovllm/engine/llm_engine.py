"""LLMEngine: requests in, finished outputs out; the loop that ties scheduler, runner and text together.

Overlap: on a GPU one step is always in flight. The next one is scheduled and launched before the ids of the last are
fetched, so that the host works while the device does. It is launched on the guess that no sequence of the step in
flight stops. A stop by length is known beforehand; after a stop by a token one row too many has been computed, which
is dropped when its id arrives. Without overlap the same functions run one after another.

It must not know how sequences become tensors, nor which block is whose. Invariant: `sequences` holds the requests that
have not ended. An error in a step ends all of them, and nothing that the step wrote is ever taken for a prefix.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count
from operator import countOf
from pathlib import Path
from threading import RLock
from typing import Any

import xxhash

from nanovllm.config import Config
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence, pack_ids
from nanovllm.errors import EngineError
from nanovllm.sampling_params import MIN_TEMPERATURE, SURROGATE, SamplingParams
from nanovllm.utils.checks import fail, is_integer, reject_unknown
from nanovllm.utils.detokenizer import Detokenizer


class LLMEngine:
    """An engine over one model folder; options as in `nanovllm.config.Config`.

    Raises `TypeError` for an unknown option, `ValueError` for a wrong value or an unusable folder.

    Any thread may use it, one at a time: `EngineError` for the others. An error or an interrupt (Ctrl-C) in the middle
    of a step aborts all requests, also those of `add_request`; the engine is empty then and goes on working. A forked
    process must not use the engine of its parent: start processes by "spawn" and build the engine there.
    """

    def __init__(self, model: str, **options: Any) -> None:
        reject_unknown("LLM", options, Config.__match_args__[1:])
        self.config = Config(model, **options)
        # imported late: `import nanovllm` stays cheap, and options are checked before torch is loaded
        from nanovllm.engine.model_runner import ModelRunner
        from nanovllm.engine.worker import LeadRunner

        self.runner = (LeadRunner if self.config.tensor_parallel_size > 1 else ModelRunner)(self.config)
        Sequence.block_size = self.config.kvcache_block_size
        self.scheduler = Scheduler(self.config, self.runner.num_kvcache_blocks, self.config.hf.eos_token_ids)
        self.overlap = self.config.async_scheduling and self.runner.is_cuda
        self.in_flight: deque[tuple[Batch, Any]] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.unclaimed: list[Sequence] = []  # finished in a step of another caller
        self.streams: set[int] = set()  # requests that belong to a running `stream`
        self.num_steps = 0
        self.request_numbers = count()
        self.closed = False
        self.lock = RLock()
        self.changing = False  # an abort that comes meanwhile, by a signal handler or another thread, has to wait
        self.broken = False  # a change was cut short
        self.to_abort: list[int] = []

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the model folder, loaded on first use; `ValueError` if there is none."""
        from transformers import AutoTokenizer

        folder = self.config.model
        try:
            if not any(any(Path(folder).glob(name)) for name in ("tokenizer*", "vocab.*")):
                raise FileNotFoundError("it has no tokenizer files")  # transformers would make an empty one
            # without the last one transformers asks on the terminal
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ValueError(f"no usable tokenizer in {folder}: {error}; token ids work without one") from error

    # Requests

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue one request and return its `seq_id`; `ValueError` or `TypeError` if it cannot run."""
        request = self._make_sequence(self._tokenize([prompt])[0], sampling_params)
        self._change(self._add, [request])
        return request.seq_id

    def abort(self, seq_id: int) -> None:
        """End a request: `step` does not return it; a `generate` or stream of it ends with what there is, the finish
        reason "abort". Unknown and finished ids are ignored; what is no integer is a `ValueError`.

        While a step runs, so in a signal handler or another thread, it ends when the step does, or with the next one.
        """
        if not is_integer(seq_id):
            fail("seq_id", seq_id, "an integer")
        self.to_abort.append(seq_id)
        if not self.changing:
            with suppress(EngineError):  # another thread is using the engine
                self._change(self._flush_aborts)

    def is_finished(self) -> bool:
        """Whether no request is waiting or running and no finished output is left to fetch."""
        return self.scheduler.is_finished() and not self.unclaimed

    def step(self, stream: bool = False) -> list[dict[str, Any]]:
        """Run one step and return the outputs of the requests that have finished.

        stream: return what is new of every request instead, as `LLM.stream` does for one: dicts with the new `text`
        and `token_ids`; `finish_reason` is `None` but in the last one, which has the other keys of an output too.
        A request with n > 1 is returned as a whole when it has finished.
        """
        finished = self._step()  # first: a stream that is closed meanwhile takes its own out of `unclaimed`
        finished = [seq for seq in self.unclaimed + finished if seq.seq_id not in self.streams]
        self.unclaimed = []
        if not stream:
            return [self._output(seq) for seq in finished]
        growing = [s for i, s in self.sequences.items() if s.has_news and not s.samples and i not in self.streams]
        return [self._piece(seq) for seq in finished + growing]

    def stats(self) -> dict[str, int]:
        """Counters since start, in tokens, steps, blocks and requests."""
        scheduler = self.scheduler
        return {
            "prompt_tokens": scheduler.num_prompt_tokens,
            "cached_prompt_tokens": scheduler.num_hit_tokens,
            "generated_tokens": scheduler.num_generated_tokens,
            "preemptions": scheduler.num_preemptions,
            "steps": self.num_steps,
            "num_kvcache_blocks": len(scheduler.block_manager.blocks),
            "num_free_blocks": len(scheduler.block_manager.free),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
        }

    def exit(self) -> None:
        """Drop all requests and free everything; may be called again."""
        if not self.closed:
            self._change(self._drop_all)
            self.unclaimed, self.closed = [], True
            self.runner.exit()

    # Inside

    def _change(self, action: Callable[..., Any], *args: Any) -> Any:
        """Do what changes the state of requests: nobody else may meanwhile, and if it is cut short all of them go."""
        self._check_open()
        if self.changing:  # a signal handler
            raise EngineError("a step of this engine is running: nothing but abort() is possible meanwhile")
        self._claim()
        try:
            self.changing = True
            if self.broken:
                self._drop_all()
            result = action(*args)
            self._flush_aborts()
            if self.scheduler.is_finished():
                self.in_flight.clear()  # rows of sequences that have ended
            return result
        except BaseException:
            self.broken = True
            self._drop_all()
            raise
        finally:
            self.changing = False
            self.lock.release()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("this engine was closed by exit()")

    def _claim(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise EngineError("another thread is using this engine: must be one thread at a time")

    def _flush_aborts(self) -> None:
        while self.to_abort:
            if request := self.sequences.pop(self.to_abort.pop(), None):
                for seq in _samples(request):
                    self.scheduler.abort(seq)

    def _tokenize(self, prompts: list[Any], special_tokens: bool = True) -> list[Any]:
        """`prompts` with ids in the place of strings; `ValueError` for text that no tokenizer takes."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str) and (found := SURROGATE.search(prompt)):
                raise ValueError(f"prompt {i} holds {found[0]!r} at {found.start()}: must not have a lone surrogate")
        # verbose: warnings of prompts that are too long, which are refused
        options = {"add_special_tokens": special_tokens, "verbose": False}
        encoded = iter(self.tokenizer(texts, **options)["input_ids"] if texts else ())
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _make_sequence(self, prompt: list[int], params: SamplingParams | None) -> Sequence:
        """A checked sequence that is not queued yet."""
        self._check_open()
        params = SamplingParams() if params is None else params
        if hasattr(prompt, "tolist"):  # a numpy array or a tensor of ids
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)):
            hint = "; conversations go to `chat`" if isinstance(prompt, dict) else ""
            raise TypeError(f"prompt is {type(prompt).__name__}: must be a string or a list of token ids{hint}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        params = replace(params)  # checks it again; and the caller may change its own for the next request
        vocab_size = self.config.hf.vocab_size
        token_ids = _check_ids("prompt", prompt, vocab_size)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if given := getattr(params, name):
                _check_ids(name, given, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (k := getattr(params, name) or 0) > vocab_size:
                raise ValueError(f"{name}={k}: must be at most {vocab_size}, the size of the vocabulary")
        if not prompt:
            raise ValueError("prompt is empty: must hold at least one token")
        texts = [text for word in params.bad_words or () for text in (word, " " + word.lstrip())]
        bad_words = list(filter(None, self.tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else []
        stop_ids = frozenset(params.stop_token_ids or ()) | (set() if params.ignore_eos else self.scheduler.eos_ids)
        banned = {word[0] for word in bad_words if len(word) == 1} | (stop_ids if params.min_tokens else set())
        if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
            raise ValueError("allowed_token_ids: must hold one that bad_words, and stops before min_tokens, leave")
        changes_logits = params.adjusts_logits or params.allowed_token_ids or bad_words
        samples = [Sequence(token_ids, params) for _ in range(params.n)]
        for seq in samples:
            self.scheduler.check(seq)
            seq.stop_ids, seq.stop_strings, seq.bad_words = stop_ids, params.stop_strings, bad_words
            seq.temperature = 0.0 if seq.temperature < MIN_TEMPERATURE else min(seq.temperature, 1e30)
            seq.has_controls = bool(changes_logits or (seq.temperature and params.truncates))
            if seq.stop_strings:
                seq.detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
            if params.n > 1:
                seq.samples = samples
            if seq is not samples[0]:
                seq.num_prompt_logprobs = None  # those of the first are everybody's
        return samples[0]

    def _add(self, requests: list[Sequence]) -> None:
        """Queue requests: only through `_change`."""
        for request, number in zip(requests, self.request_numbers):
            if request.params.seed is None:
                request.seed = xxhash.xxh64_intdigest(struct.pack("<qq", self.config.seed, number))
            key = struct.pack("<Q", request.seed % 2**64)
            self.sequences[request.seq_id] = request
            for i, seq in enumerate(_samples(request)):
                seq.seed = xxhash.xxh64_intdigest(key, seed=i) if i else request.seed
                seq.seed = (seq.seed + 2**63) % 2**64 - 2**63  # the device holds it as int64
                self.scheduler.add(seq)

    def _step(self) -> list[Sequence]:
        """Launch what can run, fetch the ids of the step before, return the requests that ended."""
        return self._change(self._advance)

    def _advance(self) -> list[Sequence]:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.in_flight.append((batch, self.runner.launch(batch)))
            self.scheduler.advance(batch)
            self.num_steps += 1
        elif not self.in_flight and not self.scheduler.is_finished():
            raise EngineError("internal error: requests are left but nothing can be scheduled")
        finished: list[Sequence] = []
        while len(self.in_flight) > (1 if self.overlap and batch else 0):
            batch_done, result = self.in_flight.popleft()
            ids = result.tolist()
            self.runner.check()
            for seq, entries, entry in result.logprobs():
                if not seq.is_finished:  # else the row is dropped
                    entries.append(entry)
            finished += self.scheduler.postprocess(batch_done, ids)
        requests = dict.fromkeys(seq.request for seq in finished)
        return [self.sequences.pop(r.seq_id) for r in requests if all(seq.is_finished for seq in r.samples)]

    def _drop_all(self) -> None:
        """Back to an empty engine; what a failed step has written is never taken for a prefix."""
        self.scheduler.reset([seq for request in self.sequences.values() for seq in _samples(request)])
        self.sequences.clear()
        self.in_flight.clear()
        self.to_abort.clear()
        self.broken = False

    def _output(self, request: Sequence) -> dict[str, Any]:
        outputs = [self._completion(seq) for seq in _samples(request)]
        return {**outputs[0], "samples": outputs} if request.samples else outputs[0]

    def _completion(self, seq: Sequence) -> dict[str, Any]:
        output: dict[str, Any] = {
            "seq_id": seq.request.seq_id,
            "text": self._text(seq),
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "prompt_token_ids": seq.prompt_token_ids,
            "num_cached_tokens": seq.num_hit_tokens,
        }
        if seq.num_logprobs is not None:
            output["logprobs"] = seq.logprobs
            output["cumulative_logprob"] = sum(entry[i] for entry, i in zip(seq.logprobs, output["token_ids"]))
        if seq.request.num_prompt_logprobs is not None:
            output["prompt_logprobs"] = seq.request.prompt_logprobs
        return output

    def _piece(self, seq: Sequence) -> dict[str, Any]:
        """What is new of a request since the last call; text only once it cannot change any more."""
        output: dict[str, Any] = {"seq_id": seq.seq_id, "finish_reason": None, "text": ""}
        if seq.is_finished:
            output = self._output(seq)
        elif seq.params.detokenize and self._has_tokenizer:
            if seq.detokenizer is None:
                seq.detokenizer = Detokenizer(self.tokenizer, seq.params.skip_special_tokens)
            seq.detokenizer.catch_up(seq.completion_token_ids)
            # what may be the beginning of a stop string is held back until it cannot be one any more
            num_held = max((len(stop) - 1 for stop in seq.stop_strings), default=0)
            output["text"] = seq.detokenizer.text[: max(0, len(seq.detokenizer.text) - num_held)]
        ids, text, sent = seq.completion_token_ids, output["text"], seq.num_sent_ids
        piece = {**output, "text": text[seq.num_sent_chars :], "token_ids": ids[sent:]}
        if seq.num_logprobs is not None:
            piece["logprobs"] = seq.logprobs[sent:]
        seq.num_sent_ids, seq.num_sent_chars = len(ids), len(text)
        return piece

    def _text(self, seq: Sequence) -> str:
        params = seq.params
        if not params.detokenize or not self._has_tokenizer:
            return ""
        ids = seq.completion_token_ids
        if isinstance(seq.stop_reason, str):
            end = seq.detokenizer.stop_at + (len(seq.stop_reason) if params.include_stop_str_in_output else 0)
            return seq.detokenizer.text[:end]
        if seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            ids = ids[:-1]  # the end token or stop id
        return self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

    @cached_property
    def _has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except ValueError:
            return False


def _check_ids(name: str, ids: Iterable[Any], vocab_size: int) -> list[int]:
    """`ids` as plain integers."""
    ids = list(ids)
    with suppress(OverflowError):  # at the speed of C; else find the bad one, or integers of another type
        plain = ids and countOf(map(type, ids), int) == len(ids)
        if plain and pack_ids(ids).max() < vocab_size:
            return ids
    for token_id in ids:
        if not is_integer(token_id):
            raise TypeError(f"{name} holds {token_id!r}: must be token ids (integers) or a string")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} holds token id {token_id}: must be in 0..{vocab_size - 1}")
    return list(map(int, ids))


def _samples(request: Sequence) -> list[Sequence]:
    """All sequences of a request: itself, or its n samples."""
    return request.samples or [request]
