"""Config: every option of the engine with its check; ModelConfig: what a `config.json` says.

It must not import torch: a wrong option is refused before anything is loaded. Invariant: a `Config` that exists is
valid for its model folder.
"""

import json
import re
from dataclasses import dataclass, field
from os import PathLike
from os.path import expanduser, isdir
from pathlib import Path
from typing import Annotated, Any

from nanovllm.errors import CheckpointError
from nanovllm.utils.checks import Rule, check, fail, integer, is_integer, one_of, real

MAX_INT = 2**31 - 1  # of the integers on the device
DTYPES = ("bfloat16", "float16", "float32")
_SIZE = integer(1, MAX_INT)
_BLOCK_SIZE = Rule("a multiple of 16, > 0 and < 2**31", lambda v: _SIZE.allows(v) and v % 16 == 0, int)
_NUM_BLOCKS = Rule(
    "-1 (what memory allows) or an integer >= 1 and < 2**31",
    lambda v: is_integer(v) and (v == -1 or 1 <= v <= MAX_INT), int,
)  # fmt: skip
# Fields that may be absent or have this value only; `auto_map` names code in the folder, which is never run.
_ACCEPTED = {"quantization_config": None, "hidden_act": "silu", "use_sliding_window": False, "auto_map": None}
# What each rope type that is supported needs beside `rope_theta`.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(slots=True)
class ModelConfig:
    """The fields of `config.json` that inference needs, checked; sizes are of the whole model.

    rope: `rope_type` ("default", "linear", "llama3", "yarn"), `rope_theta` and the type's own settings.
    eos_token_ids: union of the ids in `config.json`, `generation_config.json` and the tokenizer's files, ascending.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    rope: dict[str, Any]
    eos_token_ids: list[int]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`); raises `CheckpointError` on a bad one."""
        path = folder / "config.json"
        raw = _read_json(path)
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}

        def size(name: str, default: int | None = None) -> int:
            value: Any = default if raw.get(name) is None else raw[name]
            if not is_integer(value) or value <= 0:
                raise CheckpointError(f"{path}: {name}={value!r} must be an integer > 0")
            return value

        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise CheckpointError(f"{path}: 'architectures' is missing, the model class is unknown")
        for name, accepted in _ACCEPTED.items():
            if raw.get(name, accepted) not in (accepted, None):
                raise CheckpointError(f"{path}: {name}={raw[name]!r} is not supported")
        heads = size("num_attention_heads")
        kv_heads = size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"{heads} attention heads cannot be grouped over {kv_heads} key/value heads")
        eps = raw.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise CheckpointError(f"{path}: rms_norm_eps={eps!r} must be a number in (0, 1)")
        # transformers 5 writes "dtype", 4 wrote "torch_dtype"
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        as_it_is = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        return cls(
            **{name: size(name) for name in as_it_is},
            architecture=architectures[0],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size("head_dim", size("hidden_size") // heads),
            rms_norm_eps=eps,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            dtype=dtype if dtype in DTYPES else "float32",
            rope=_rope_settings(raw, path),
            eos_token_ids=sorted({*_id_list(raw), *_id_list(generation), *_tokenizer_eos(folder)}),
        )


@dataclass(slots=True)
class Config:
    """Options of an engine; the constructor checks them and reads the model's files.

    Lengths are in tokens. `max_model_len` ends up as the smaller of the option and the model's own
    limit; `device` and `dtype` are resolved when the engine is built.
    """

    model: str
    device: Annotated[str, one_of("auto", "cuda", "cpu")] = "auto"
    dtype: Annotated[str, one_of("auto", *DTYPES)] = "auto"
    max_model_len: Annotated[int, _SIZE] = 4096
    max_num_seqs: Annotated[int, integer(1, 65535)] = 512  # a grid of CUDA has no more rows
    max_num_batched_tokens: Annotated[int, _SIZE] = 16384
    gpu_memory_utilization: Annotated[float, real("a number in (0, 1]", lambda share: 0 < share <= 1)] = 0.9
    kvcache_block_size: Annotated[int, _BLOCK_SIZE] = 256
    num_kvcache_blocks: Annotated[int, _NUM_BLOCKS] = -1
    enable_prefix_caching: bool = True
    tensor_parallel_size: Annotated[int, integer(1, 8)] = 1
    enforce_eager: bool = False
    async_scheduling: bool = True
    attention_backend: Annotated[str, one_of("auto", "flash_attn", "triton", "torch")] = "auto"
    load_format: Annotated[str, one_of("auto", "dummy")] = "auto"
    seed: Annotated[int, integer(-(2**63), 2**63 - 1)] = 0
    hf: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.model, (str, PathLike)) or not str(self.model):
            fail("model", self.model, "the path of a local folder")
        folder = expanduser(self.model)
        if not isdir(folder):
            hint = "there is no such folder"
            if name := re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]{,95}", str(self.model)):
                hub_id = name[0] if name[1] else f"OWNER/{name[0]}"
                hint += f"; if it is a model of the hub, `hf download {hub_id} --local-dir ./model`, and pass ./model"
            fail("model", self.model, f"a local folder with config.json, *.safetensors and a tokenizer; {hint}")
        self.model = folder
        self.hf = ModelConfig.from_folder(Path(folder))
        self.max_model_len = min(self.max_model_len, self.hf.max_position_embeddings)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


def _rope_settings(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """One dict from transformers 5's `rope_parameters` or 4's `rope_theta` and `rope_scaling`."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: rope settings {settings!r} must be a JSON object")
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **settings}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    needed = _ROPE_FIELDS.get(str(rope["rope_type"]))
    if needed is None:
        raise CheckpointError(f"{path}: rope_type={rope['rope_type']!r} must be one of {', '.join(_ROPE_FIELDS)}")
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    for name in ("rope_theta", *needed):
        value = rope.get(name)
        if not isinstance(value, (int, float)) or not value > 0:
            raise CheckpointError(f"{path}: rope setting {name}={value!r} must be a number > 0")
    return rope


def _tokenizer_eos(folder: Path) -> list[int]:
    """The id of the tokenizer's own end token, read from its files without loading it."""
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    token = _read_json(settings).get("eos_token") if settings.is_file() else None
    content = token.get("content") if isinstance(token, dict) else token
    if content is None or not tokenizer.is_file():
        return []
    added = _read_json(tokenizer).get("added_tokens", [])
    if not isinstance(added, list) or not all(isinstance(t, dict) and is_integer(t.get("id")) for t in added):
        raise CheckpointError(f"{tokenizer}: added_tokens must be a list of objects with an integer 'id'")
    return [t["id"] for t in added if t.get("content") == content]


def _id_list(raw: dict[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(is_integer, ids)):
        raise CheckpointError(f"eos_token_id={value!r} in the model's configuration: must be an integer or several")
    return ids
