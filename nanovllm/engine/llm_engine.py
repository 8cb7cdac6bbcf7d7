"""LLMEngine: requests in, finished outputs out; it ties scheduler, runner and text together.

With overlap one step is always in flight: the next one is scheduled and launched before the ids of
the last one are fetched, and everything the host does happens while the device works.
"""

import struct
from collections import deque
from functools import cached_property
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.config import Config
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.detokenizer import Detokenizer


class LLMEngine:
    """An engine over one model folder; options as in `Config`.

    Raises `TypeError` for an unknown option, `ValueError` for a wrong value or an unusable folder.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = Config.create(model, **options)
        # imported late: `import nanovllm` stays cheap, and options are checked before torch is loaded
        from nanovllm.engine.model_runner import ModelRunner
        from nanovllm.engine.worker import LeadRunner

        self.runner = (LeadRunner if self.config.tensor_parallel_size > 1 else ModelRunner)(self.config)
        Sequence.block_size = self.config.kvcache_block_size
        self.scheduler = Scheduler(self.config, self.runner.num_kvcache_blocks, self.config.hf.eos_token_ids)
        self.overlap = self.config.async_scheduling and self.runner.is_cuda
        self.in_flight: deque[tuple[Batch, Any]] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.unclaimed: list[dict[str, Any]] = []
        self.num_steps = 0
        self.request_numbers = count()
        self.closed = False

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the model folder, loaded on first use; `ValueError` if there is none."""
        from transformers import AutoTokenizer

        try:
            if not any(any(Path(self.config.model).glob(name)) for name in ("tokenizer*", "vocab.*")):
                raise FileNotFoundError("it has no tokenizer files")  # transformers would make an empty one
            return AutoTokenizer.from_pretrained(self.config.model, local_files_only=True)
        except Exception as error:
            raise ValueError(
                f"no usable tokenizer in {self.config.model}: {error}; prompts of token ids work without one"
            ) from error

    # Requests

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue one request and return its `seq_id`; `ValueError` or `TypeError` if it cannot run."""
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._enqueue(self._make_sequence(ids, params))

    def abort(self, seq_id: int) -> None:
        """End a request; it is never part of a result. Unknown and finished ids are ignored."""
        if seq := self.sequences.pop(seq_id, None):
            self.scheduler.abort(seq)

    def is_finished(self) -> bool:
        """Whether no request is waiting or running and no finished output is left to fetch."""
        return self.scheduler.is_finished() and not self.unclaimed

    def step(self) -> list[dict[str, Any]]:
        """Run one step and return the outputs of the requests that have finished."""
        outputs, self.unclaimed = self.unclaimed, []
        return outputs + [self._output(seq) for seq in self._step()]

    def stats(self) -> dict[str, int]:
        """Counters since start, in tokens, steps, blocks and requests."""
        scheduler = self.scheduler
        running = scheduler.running.values()
        return {
            "prompt_tokens": scheduler.num_prompt_tokens,
            "cached_prompt_tokens": scheduler.num_hit_tokens,
            "generated_tokens": scheduler.num_generated_tokens,
            "preemptions": scheduler.num_preemptions,
            "steps": self.num_steps,
            "num_kvcache_blocks": len(scheduler.block_manager.blocks),
            "num_free_blocks": scheduler.block_manager.num_free_blocks,
            "num_running": len(running),
            "num_waiting": len(scheduler.waiting),
        }

    def exit(self) -> None:
        """Drop all requests and free everything; may be called again."""
        if not self.closed:
            self.closed = True
            self._drop_all()
            self.runner.exit()

    # Inside

    def _make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """A checked sequence that is not queued yet."""
        if self.closed:
            raise EngineError("this engine was closed by exit()")
        if hasattr(prompt, "tolist"):  # a numpy array or a tensor of ids
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"prompt is {type(prompt).__name__}: must be a string or a list of token ids")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        vocab_size = self.config.hf.vocab_size
        for name, ids in (("prompt", prompt), ("stop_token_ids", params.stop_token_ids or ())):
            if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
                continue  # fine, at the speed of C; else find the bad one, or integers of another type
            for token_id in ids:
                if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                    raise TypeError(f"{name} holds {token_id!r}: must be token ids (integers) or a string")
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} holds token id {token_id}: must be in 0..{vocab_size - 1}")
        if not prompt:
            raise ValueError("prompt is empty: must hold at least one token")
        seq = Sequence(map(int, prompt), params)
        self.scheduler.check(seq)
        eos_ids = () if params.ignore_eos else self.scheduler.eos_ids
        seq.stop_ids = frozenset(params.stop_token_ids or ()) | frozenset(eos_ids)
        # dividing logits by less would overflow
        seq.temperature = 0.0 if seq.temperature < 1e-5 else min(seq.temperature, 1e30)
        seq.stop_strings = params.stop_strings
        if seq.stop_strings:
            seq.detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
        return seq

    def _enqueue(self, seq: Sequence) -> int:
        number = next(self.request_numbers)
        if seq.params.seed is None:
            key = struct.pack("<qq", self.config.seed, number)
            seq.seed = xxhash.xxh64_intdigest(key)
        seq.seed = (seq.seed + 2**63) % 2**64 - 2**63  # the device holds it as int64
        self.sequences[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq.seq_id

    def _step(self) -> list[Sequence]:
        """Launch what can run, fetch the ids of the step before, return the sequences that ended."""
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self.in_flight.append((batch, self.runner.launch(batch)))
                self.scheduler.advance(batch)
                self.num_steps += 1
            elif not self.in_flight and not self.scheduler.is_finished():
                raise EngineError("internal error: requests are left but nothing can be scheduled")
            finished: list[Sequence] = []
            while len(self.in_flight) > (1 if self.overlap and batch else 0):
                batch_done, ids = self.in_flight.popleft()
                token_ids = ids.tolist()
                self.runner.check()
                finished += self.scheduler.postprocess(batch_done, token_ids)
        except BaseException:
            self._drop_all()
            raise
        if self.scheduler.is_finished():
            self.in_flight.clear()  # rows of sequences that ended a step ago
        for seq in finished:
            del self.sequences[seq.seq_id]
        return finished

    def _drop_all(self) -> None:
        """Back to an empty engine; what a failed step has written is never taken for a prefix."""
        for seq in self.sequences.values():
            self.scheduler.abort(seq)
        self.sequences.clear()
        self.in_flight.clear()
        self.scheduler.block_manager.clear_cache()

    def _output(self, seq: Sequence) -> dict[str, Any]:
        return {
            "seq_id": seq.seq_id,
            "text": self._text(seq),
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "prompt_token_ids": seq.prompt_token_ids,
            "num_cached_tokens": seq.num_hit_tokens,
        }

    def _text(self, seq: Sequence) -> str:
        params = seq.params
        if not params.detokenize or not self._has_tokenizer:
            return ""
        ids = seq.completion_token_ids
        if isinstance(seq.stop_reason, str):
            text: str = seq.detokenizer.text
            end = seq.detokenizer.stop_at
            return text[: end + len(seq.stop_reason) if params.include_stop_str_in_output else end]
        if seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            ids = ids[:-1]  # the end token or stop id
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text

    @cached_property
    def _has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except ValueError:
            return False
