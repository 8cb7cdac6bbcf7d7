"""Ray Data: the rows of a dataset through a pool of engines on one host or a cluster; all scheduling is Ray's."""

import asyncio
import secrets
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from nanovllm.config import Config
from nanovllm.errors import EngineError, reject_unknown
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_LOGPROBS = pa.list_(pa.map_(pa.int32(), pa.float64()))
# Fixed, because every block has to have one schema, also one without an error or a stop string.
_TYPES = {
    "seq_id": pa.int64(),
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "num_cached_tokens": pa.int32(),
    "error": pa.string(),
}
_TYPES_ASKED_FOR = {"logprobs": _LOGPROBS, "prompt_logprobs": _LOGPROBS, "cumulative_logprob": pa.float64()}
# Batches that an engine works on at once. One is done when its longest row is; until then the rows of the others have
# to keep the engine full, which needs 1 + max_num_seqs / batch_size * (longest / mean output) batches.
_BATCHES_AT_ONCE = 16


class LLMActor:
    """A callable for `Dataset.map_batches(..., batch_format="pyarrow")` that owns one engine.

    sampling_params: of rows that do not say otherwise.
    chat_template_kwargs: as in `LLM.chat`.
    options: of `LLM`. Without a `seed` every engine has one of its own, so that equal prompts differ.

    A row has a `prompt` (text or ids) or `messages` (a conversation). A column named like a field of `SamplingParams`
    sets that field where it is not null. All columns stay; the keys of an output are added (`stop_reason` as text), and
    `error`, which is null unless the row was refused: then the outputs are null.
    Calls may overlap: they share the engine.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.params = sampling_params or SamplingParams()
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.llm = LLM(model, **{"seed": secrets.randbits(63), **options})
        self.outputs: dict[int, dict[str, Any]] = {}

    async def __call__(self, table: pa.Table) -> pa.Table:
        names = set(table.column_names)
        if not names & {"prompt", "messages"}:
            raise ValueError(f"the columns are {', '.join(table.column_names)}: one must be `prompt` or `messages`")
        if taken := sorted(names & {*_TYPES, "cumulative_logprob", "samples"}):
            raise ValueError(f"columns {', '.join(taken)} are names of outputs: rename or drop them first")
        rows = table.select(sorted(names & {"prompt", "messages", *_SAMPLING})).to_pylist()
        results: list[dict[str, Any]] = [{}] * len(rows)
        pending: dict[int, int] = {}
        try:
            # tokenizing and templates in another thread: the engine goes on with the other batches
            for i, request in enumerate(await asyncio.to_thread(lambda: [*map(self._request, rows)])):
                try:
                    if isinstance(request, Exception):
                        raise request
                    pending[self.llm.add_request(*request)] = i
                except (TypeError, ValueError) as error:
                    results[i] = {"error": str(error)}
            while pending:
                self.outputs.update((output["seq_id"], output) for output in self.llm.step())
                for seq_id in pending.keys() & self.outputs.keys():
                    results[pending.pop(seq_id)] = self.outputs.pop(seq_id)
                if pending and self.llm.is_finished():
                    raise EngineError("the engine failed in a step of another batch")
                await asyncio.sleep(0)
        finally:
            for seq_id in pending:
                self.llm.abort(seq_id)
                self.outputs.pop(seq_id, None)
        keys = [*_TYPES, *(key for key in _TYPES_ASKED_FOR if any(key in result for result in results))]
        for key in keys:
            values = [result.get(key) for result in results]
            if key == "stop_reason":  # a column has one type
                values = [None if value is None else str(value) for value in values]
            column = pa.array(values, _TYPES.get(key) or _TYPES_ASKED_FOR[key])
            if key in names:  # `logprobs=5` asks, its result takes the place
                table = table.drop_columns([key])
            table = table.append_column(key, column)
        return table

    def _request(self, row: dict[str, Any]) -> tuple[list[int], SamplingParams] | Exception:
        """The ids and parameters of a row, or why it is refused."""
        try:
            fields = {name: value for name, value in row.items() if name in _SAMPLING and value is not None}
            params = replace(self.params, **fields)
            prompt, messages = row.get("prompt"), row.get("messages")
            if (prompt is None) == (messages is None):
                raise ValueError("a row needs a `prompt` or `messages`, and not both")
            if messages is not None:
                # Arrow gives every message the keys of all
                chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
                text = self.llm.tokenizer.apply_chat_template(
                    chat, **{"tokenize": False, "add_generation_prompt": True, **self.chat_template_kwargs}
                )
                return self.llm.tokenizer.encode(text, add_special_tokens=False), params
            return self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params
        except Exception as error:  # also of a template or a tokenizer: one row must not end the job
            return error


def generate(
    ds: Dataset,
    model: str,
    sampling_params: SamplingParams | None = None,
    *,
    num_engines: int,
    batch_size: int | None = None,
    sort_by: str | list[str] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Send the rows of `ds` through `num_engines` engines; lazy, like every transform of a `Dataset`.

    Rows, columns, `options` and their defaults are those of `LLMActor`. An engine takes `tensor_parallel_size` GPUs of
    one host, or with `device="cpu"` one CPU; leave at least one CPU of the cluster to the reading tasks.

    batch_size: rows of a task, `max_num_seqs / 2` by default; what a killed actor was working on runs again.
    sort_by: columns whose equal rows share a prefix: sorted by them, such rows reach the same engine one after another.

    `TypeError` for an unknown option. A killed actor is restarted by Ray and its rows run again.
    """
    reject_unknown("LLM", options, (f.name for f in fields(Config) if f.init and f.name != "model"))
    on_cpu = options.get("device") == "cpu"
    if batch_size is None:
        batch_size = max(1, options.get("max_num_seqs", Config.max_num_seqs) // 2)
    if sort_by is not None:
        ds = ds.sort(sort_by)
    return ds.repartition(target_num_rows_per_block=batch_size, strict=True).map_batches(
        LLMActor,
        fn_constructor_args=(model, sampling_params, chat_template_kwargs),
        fn_constructor_kwargs=options,
        batch_size=batch_size,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        num_cpus=1 if on_cpu else None,
        num_gpus=0 if on_cpu else options.get("tensor_parallel_size", 1),
        # tasks beyond those at work are rows that are on the way before anybody waits for them
        compute=ActorPoolStrategy(
            size=num_engines,
            max_concurrent_calls_per_actor=_BATCHES_AT_ONCE,
            max_tasks_in_flight_per_actor=_BATCHES_AT_ONCE + 4,
        ),
    )
