"""LLM: what a script calls; prompts in bulk through the engine, results in their order.

It checks and tokenizes all prompts, queues them and steps until they have ended. It must not know of blocks, batches
or devices: all scheduling is the engine's. Invariant: a call returns the results of its own requests and leaves none
behind. Whatever ends it early aborts them, and results of other callers that it meets are kept for `step`.
"""

from collections.abc import Iterator
from numbers import Integral
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

Prompt = str | list[int]
Params = SamplingParams | list[SamplingParams] | None
Message = dict[str, Any]
Output = dict[str, Any]


class LLM(LLMEngine):
    """A model folder ready to generate. `with LLM(path) as llm:` frees everything at the end.

    Options and their defaults are those of `Config`. A request's output is a dict:

    text: completion without special tokens and without the stop string; "" without a tokenizer.
    token_ids: generated ids, the stop token included when one ended it.
    finish_reason: "stop", "length" or "abort"; stop_reason: the stop string or stop id that matched,
        `None` for an end-of-sequence id or a length.
    prompt_token_ids, num_cached_tokens: the prompt, and how many of its tokens the prefix cache had.
    seq_id: of the request.
    logprobs, cumulative_logprob, prompt_logprobs: if asked for; one dict a token, id -> log-probability, the best
        first and the token's own always in it; `None` for the first token of the prompt.
    samples: with n > 1, n dicts of the same keys; the top level repeats the first.
    """

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.exit()

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[Output]:
        """Complete every prompt and return the outputs in their order.

        prompts: a string, a list of ids, or a list of either.
        sampling_params: one for all, or one a prompt.

        Every prompt is checked before any runs: `ValueError` or `TypeError` with the index of the bad one.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm)

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None, use_tqdm: bool = True,
        add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[Output]:  # fmt: skip
        """Complete one conversation (a list of role/content dicts) or several, through the model's chat template."""
        is_list = isinstance(messages, (list, tuple))
        several = is_list and (not messages or isinstance(messages[0], (list, tuple)))
        conversations: list[Any] = messages if several else [messages]
        prompts = self.chat_prompts(conversations, chat_template_kwargs, add_generation_prompt)
        return self._run(prompts, sampling_params, use_tqdm)

    def chat_prompts(
        self, conversations: list[list[Message]], chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[list[int]]:  # fmt: skip
        """The prompts that `chat` makes of conversations, as `stream` and `add_request` take them."""
        for i, chat in enumerate(conversations):
            is_list = isinstance(chat, (list, tuple)) and bool(chat)
            if not is_list or not all(isinstance(message, dict) and "role" in message for message in chat):
                raise TypeError(f"conversation {i} is {chat!r}: must be a list of role/content dicts, not empty")
            for message in chat:  # templates make an empty text, or Python's repr, of anything else
                content = message.get("content")
                if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
                    raise TypeError(f"conversation {i} has content={content!r}: must be a string")
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, dict) or "tokenize" in given:
            raise TypeError(f"chat_template_kwargs={given!r}: must be a dict of variables of the template")
        options = {"add_generation_prompt": add_generation_prompt, **given}
        texts = [self.tokenizer.apply_chat_template(chat, tokenize=False, **options) for chat in conversations]
        return self._tokenize(texts, special_tokens=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield dicts with the new `text` and `token_ids` of one request; the last has `finish_reason`.

        Text comes only once it cannot change any more. Leaving the loop early aborts the request. For many requests
        at once there is `step(stream=True)`.
        """
        prompts = _as_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"prompt holds {len(prompts)} prompts: must be one, a string or a list of token ids")
        seq = self._make_sequence(self._tokenize(prompts)[0], sampling_params)
        if seq.samples:
            raise ValueError(f"SamplingParams.n={seq.params.n}: must be 1 in a stream; generate gives several samples")
        return self._stream(seq)

    def _stream(self, seq: Sequence) -> Iterator[Output]:
        self.streams.add(seq.seq_id)
        try:
            self._change(self._add, [seq])
            while not seq.is_finished:
                self.unclaimed += [done for done in self._step() if done is not seq]
                if seq.has_news and not seq.is_finished:
                    yield self._piece(seq)
            yield self._piece(seq)
        finally:
            self.abort(seq.seq_id)
            self.streams.remove(seq.seq_id)
            self.unclaimed = [done for done in self.unclaimed if done is not seq]

    # Inside

    def _run(self, prompts: list[Any], sampling_params: Params, use_tqdm: bool) -> list[Output]:
        """Check and queue all prompts, step until they have ended, return their outputs in the same order."""
        sequences: list[Sequence] = []
        for params, ids in zip(_one_each(sampling_params, len(prompts)), self._tokenize(prompts)):
            try:
                sequences.append(self._make_sequence(ids, params))
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompt {len(sequences)}: {error}") from None
        self._claim()
        outputs: dict[int, Output] = {seq.seq_id: {} for seq in sequences}
        start, before = perf_counter(), self.stats()
        try:
            self._change(self._add, sequences)
            total, off = len(sequences), not use_tqdm
            with tqdm(total=total, desc="Generating", unit="req", disable=off, dynamic_ncols=True) as bar:
                for awaited in sequences:
                    while awaited.seq_id in self.sequences:
                        for seq in self._step():
                            if seq.seq_id in outputs:
                                outputs[seq.seq_id] = self._output(seq)
                                bar.update()
                            else:
                                self.unclaimed.append(seq)  # of `add_request`: the next `step` returns it
                        if use_tqdm:
                            bar.set_postfix(self._speed(before, perf_counter() - start), refresh=False)
        except BaseException:
            self.to_abort.extend(outputs)  # at once: a second interrupt may follow
            self._change(self._flush_aborts)
            raise
        finally:
            self.lock.release()
        # one that a signal handler has aborted never came out of a step
        return [outputs[seq.seq_id] or self._output(seq) for seq in sequences]

    def _speed(self, before: dict[str, int], seconds: float) -> dict[str, str]:
        new = {key: value - before[key] for key, value in self.stats().items()}
        prefill, decode = new["prompt_tokens"] - new["cached_prompt_tokens"], new["generated_tokens"]
        return {"prefill": f"{prefill / seconds:.0f} tok/s", "decode": f"{decode / seconds:.0f} tok/s"}


def _as_list(prompts: Any) -> list[Any]:
    """`prompts` as a list of prompts: strings and lists of ids; a lone prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor
        prompts = prompts.tolist()
    if not isinstance(prompts, (list, tuple)):
        kind = type(prompts).__name__
        raise TypeError(f"prompts is {kind}: must be a string, a list of token ids, or a list of either")
    return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)


def _one_each(params: Params, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"sampling_params={params!r}: must be a SamplingParams or a list of them")
    if len(params) != n:
        raise ValueError(f"sampling_params has {len(params)} entries: must be one, or one for each of the {n} prompts")
    return list(params)
