"""Ray Data: the rows of a dataset through a pool of engines on one host or a cluster; all scheduling is Ray's.

It knows nothing of the engine but what scripts use. Invariant: every row of a table comes back once, in its place, with
its outputs or the reason why it was refused.
"""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from nanovllm.errors import EngineError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams, ids_from_text

# Batches that an engine works on at once. A batch is done when its longest row is; until then the rows of the others
# have to keep the engine full: that takes 1 + max_num_seqs / batch_size * (longest / mean output) batches.
BATCHES_AT_ONCE = 16
# The pool has to be up by then: longer than loading any model takes.
START_SECONDS = 1800

_INPUTS = {"prompt", "messages", *(f.name for f in fields(SamplingParams))}
_IDS, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.map_(pa.int32(), pa.float64()))
# Fixed, because every block needs one schema, also a block without an error or a stop string.
_OUTPUTS = {
    "seq_id": pa.int64(), "text": pa.string(), "token_ids": _IDS, "finish_reason": pa.string(),
    "stop_reason": pa.string(), "prompt_token_ids": _IDS, "num_cached_tokens": pa.int32(), "error": pa.string(),
}  # fmt: skip
# Only in blocks where a row asks for them.
_OPTIONAL = {
    "logprobs": _LOGPROBS, "prompt_logprobs": _LOGPROBS, "cumulative_logprob": pa.float64(),
    "samples": pa.list_(pa.struct({"text": pa.string(), "token_ids": _IDS, "finish_reason": pa.string()})),
}  # fmt: skip


class LLMActor:
    """A callable for `Dataset.map_batches(..., batch_format="pyarrow")` that owns one engine.

    sampling_params: of rows that do not say otherwise.
    options: of `LLM`, and `chat_template_kwargs` as in `LLM.chat`. Without a `seed` every engine has one of its own, so
        that equal prompts differ.

    A row has a `prompt` (text or ids) or `messages` (a conversation). A column named like a field of `SamplingParams`
    sets that field where it is not null. All columns stay; the keys of an output are added, `stop_reason` as text, and
    `error`: null, or why the row was refused; its outputs are null then.
    Calls may overlap: they share the engine.
    """

    def __init__(self, model: str, sampling_params: SamplingParams | None = None, **options: Any) -> None:
        self.params = sampling_params or SamplingParams()
        self.template_options = options.pop("chat_template_kwargs", {})
        self.llm = LLM(model, **{"seed": secrets.randbits(63), **options})
        self.thread = ThreadPoolExecutor(1)
        self.outputs: dict[int, dict[str, Any]] = {}

    async def __call__(self, table: pa.Table) -> pa.Table:
        if taken := [name for name in table.column_names if name in (_OUTPUTS | _OPTIONAL).keys() - _INPUTS]:
            raise ValueError(f"columns {', '.join(taken)} are names of outputs: rename or drop them")
        results: list[dict[str, Any]] = [{}] * len(table)
        pending: dict[int, int] = {}
        rows = table.select(_INPUTS.intersection(table.column_names)).to_pylist()
        # in another thread: the engine goes on with the batches before
        requests = asyncio.get_running_loop().run_in_executor(self.thread, lambda: [*map(self._request, rows)])
        for i, request in enumerate(await requests):
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
                raise EngineError("a step of another batch has failed")
            await asyncio.sleep(0)
        columns = dict(zip(table.column_names, table.columns))
        for key, kind in (_OUTPUTS | _OPTIONAL).items():
            values = [result.get(key) for result in results]
            if key == "stop_reason":
                values = [None if value is None else str(value) for value in values]
            # a column `logprobs` that asks is replaced by the answer
            if key in _OUTPUTS or key in columns or any(value is not None for value in values):
                columns[key] = pa.array(values, kind)
        return pa.table(columns)

    def _request(self, row: dict[str, Any]) -> tuple[list[int], SamplingParams] | Exception:
        """What `add_request` takes, texts as ids, or why the row is refused."""
        try:
            prompt, messages = row.pop("prompt", None), row.pop("messages", None)
            if (prompt is None) == (messages is None):
                raise ValueError("a row needs a `prompt` or `messages`, and not both")
            if messages is not None:
                [prompt] = self.llm.chat_prompts([[*map(_given, messages)]], self.template_options)
            elif isinstance(prompt, str):
                prompt = self.llm.tokenizer.encode(prompt)
            given = {name: _whole(value) for name, value in _given(row).items()}
            bias = given.get("logit_bias")
            if isinstance(bias, list) and all(isinstance(pair, tuple) for pair in bias):  # a map of Arrow
                bias = dict(bias)
            if isinstance(bias, dict):
                given["logit_bias"] = ids_from_text(_given(bias))
            return prompt, replace(self.params, **given)
        except Exception as error:  # whatever a template or a tokenizer raises must not end the job
            return ValueError(str(error))


def _given(item: dict[str, Any]) -> dict[str, Any]:
    """An object without nulls: Arrow gives each object of a column the keys of all."""
    return {key: value for key, value in item.items() if value is not None}


def _whole(value: Any) -> Any:
    """pandas makes floats of a column of integers and nulls."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def generate(
    ds: Dataset, model: str, sampling_params: SamplingParams | None = None, *, num_engines: int, batch_size: int = 256,
    **options: Any,
) -> Dataset:  # fmt: skip
    """Send the rows of `ds` through `num_engines` engines; lazy, like every transform of a `Dataset`.

    Rows, their new columns and `options` are those of `LLMActor`. An engine takes `tensor_parallel_size` GPUs of one
    host, or with `device="cpu"` half a CPU: tasks that read and sort find room beside an engine on every core.
    Neighbours reach the same engine one after another: sort `ds` by what rows with a common prefix share.

    batch_size: rows of a task. Work starts when all engines are ready; more than the cluster has room for are an error
        after half an hour. Ray restarts an actor that died and runs its unfinished batches again.
    """
    on_cpu = options.get("device") == "cpu"
    # a block a batch: nothing that has finished is computed again, and rows spread evenly
    ds = ds.repartition(target_num_rows_per_block=batch_size, strict=True).map_batches(
        LLMActor, fn_constructor_args=(model, sampling_params), fn_constructor_kwargs=options,
        batch_size=batch_size, batch_format="pyarrow",
        num_cpus=0.5 if on_cpu else None, num_gpus=None if on_cpu else options.get("tensor_parallel_size", 1),
        compute=ActorPoolStrategy(
            size=num_engines, max_concurrent_calls_per_actor=BATCHES_AT_ONCE,
            max_tasks_in_flight_per_actor=BATCHES_AT_ONCE + 4,  # rows are there before an engine asks
        ),
    )  # fmt: skip
    # the first engine to be ready must not take all the tasks of a small job
    ds.context.wait_for_min_actors_s = START_SECONDS
    return ds
