"""Options of the engine: what each accepts, that a wrong one is refused with name, value and range; and the files."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.config import Config, ModelConfig

DEFAULTS: dict[str, Any] = {
    "device": "auto", "dtype": "auto", "max_model_len": 4096, "max_num_seqs": 512, "max_num_batched_tokens": 16384,
    "gpu_memory_utilization": 0.9, "kvcache_block_size": 256, "num_kvcache_blocks": -1, "enable_prefix_caching": True,
    "tensor_parallel_size": 1, "enforce_eager": False, "async_scheduling": True, "attention_backend": "auto",
    "load_format": "auto", "seed": 0,
}  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "device": ["auto", "cuda", "cpu"],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
    "max_model_len": [1, 2, 100, np.int64(64)],
    "max_num_seqs": [1, 4, np.int32(3)],
    "max_num_batched_tokens": [1, 7, 10**6],
    "gpu_memory_utilization": [1e-3, 0.5, 1, 1.0, np.float32(0.5)],
    "kvcache_block_size": [16, 32, 48, 256, 4096],
    "num_kvcache_blocks": [-1, 1, 100],
    "enable_prefix_caching": [True, False],
    "tensor_parallel_size": [1, 2, 8],
    "enforce_eager": [True, False],
    "async_scheduling": [True, False],
    "attention_backend": ["auto", "flash_attn", "triton", "torch"],
    "load_format": ["auto", "dummy"],
    "seed": [0, -1, -(2**63), 2**63 - 1],
}
NO_INTEGER = ["1", None, [1], 1.5, 16.0, math.nan, math.inf, True]
NO_BOOL = [0, 1, "yes", None]
NO_CHOICE = ["", "AUTO", "gpu", None, 1, True, ["auto"]]
BAD: dict[str, list[Any]] = {
    "device": NO_CHOICE,
    "dtype": [*NO_CHOICE, "int8", "bf16"],
    "max_model_len": [*NO_INTEGER, 0, -1, 10**30],
    "max_num_seqs": [*NO_INTEGER, 0, -1, 65536, 2**31, 10**30],
    "max_num_batched_tokens": [*NO_INTEGER, 0, -1, 2**31, 10**30],
    "gpu_memory_utilization": ["0.9", None, True, math.nan, math.inf, 0, -0.1, 1.01, 90],
    "kvcache_block_size": [*NO_INTEGER, 0, -16, 1, 8, 17, 255, 2**31, 16 * 10**30],
    "num_kvcache_blocks": [*NO_INTEGER, 0, -2, 2**31, 10**30],
    "enable_prefix_caching": NO_BOOL,
    "tensor_parallel_size": [*NO_INTEGER, 0, -1, 9],
    "enforce_eager": NO_BOOL,
    "async_scheduling": NO_BOOL,
    "attention_backend": [*NO_CHOICE, "sdpa"],
    "load_format": [*NO_CHOICE, "pt"],
    "seed": ["1", None, 1.5, math.nan, True, 2**63, -(2**63) - 1],
}
RANGES = {
    "device": "cuda", "dtype": "bfloat16", "max_model_len": ">= 1", "max_num_seqs": ">= 1",
    "max_num_batched_tokens": ">= 1", "gpu_memory_utilization": "(0, 1]", "kvcache_block_size": "16",
    "num_kvcache_blocks": "-1", "enable_prefix_caching": "True or False", "tensor_parallel_size": ">= 1 and <= 8",
    "enforce_eager": "True or False", "async_scheduling": "True or False", "attention_backend": "flash_attn",
    "load_format": "dummy", "seed": "integer",
}  # fmt: skip


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{value}") for name, values in table.items() for value in values]


def changed(source: str, target: Path, **fields: Any) -> str:
    """A copy of a model folder with other fields in its config.json; `None` removes one."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.update(fields)
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(target)


def test_every_option_is_covered_here_with_its_documented_default(random_model: str) -> None:
    config = Config(random_model)
    assert set(DEFAULTS) == set(GOOD) == set(BAD) == set(config.__slots__) - {"model", "hf"}
    limited = {**DEFAULTS, "max_model_len": 2048}  # by the model
    assert {name: getattr(config, name) for name in DEFAULTS} == limited


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_value_within_the_range_is_accepted(random_model: str, name: str, value: Any) -> None:
    assert getattr(Config(random_model, **{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_wrong_value_is_an_error_with_option_value_and_range(random_model: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        LLM(random_model, **{name: value})
    assert f"{name}={value!r}" in str(error.value)
    assert RANGES[name] in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("dtpye", "dtype"), ("max_seqs", "max_num_seqs"), ("max_len", "max_model_len"),
        ("tensor_parallel", "tensor_parallel_size"), ("enable_prefix_cache", "enable_prefix_caching"),
        ("block_size", "kvcache_block_size"), ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("eager", "enforce_eager"), ("Seed", "seed"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_a_type_error_that_names_the_nearest(random_model: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"{wrong!r}") as error:
        LLM(random_model, **{wrong: "float32"})
    assert f"did you mean {right!r}" in str(error.value)


@pytest.mark.parametrize("wrong", ["tp_size", "trust_remote_code", "swap_space", "x"])
def test_no_option_is_proposed_for_a_name_that_none_resembles(random_model: str, wrong: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no option {wrong!r}. Valid: device, dtype, "):
        LLM(random_model, **{wrong: 1})


def test_an_unknown_option_is_refused_before_the_model_is_looked_at() -> None:
    with pytest.raises(TypeError, match="dtype"):
        LLM("no/such/folder", dtpye="float32")


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("Qwen3-0.6B", "OWNER/Qwen3-0.6B"), ("gpt2", "OWNER/gpt2")],
)
def test_a_name_of_the_hub_gives_an_error_that_says_how_to_download(name: str, hub_id: str) -> None:
    with pytest.raises(ValueError, match=f"local folder.*hf download {re.escape(hub_id)} --local-dir"):
        LLM(name)


def test_a_tilde_is_the_home_folder(random_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(random_model).parent))
    config = Config(f"~/{Path(random_model).name}")
    assert config.model == random_model and config.hf.vocab_size == 1000


@pytest.mark.parametrize("model", [None, 5, "", "no/such/folder", b"x"])
def test_a_model_that_is_no_folder_is_an_error_that_shows_it(model: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        LLM(model)
    assert model in (None, 5, "", b"x") or repr(model) in str(error.value)


@pytest.mark.parametrize("model", ["/nope", "./nope", "no/such/folder", "~/model", "x" * 5000, "a\0b"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(model: str) -> None:
    with pytest.raises(ValueError, match="there is no such folder") as error:
        LLM(model)
    assert "hf download" not in str(error.value)


def test_a_file_instead_of_a_folder_is_refused(random_model: str) -> None:
    with pytest.raises(ValueError, match="local folder"):
        LLM(f"{random_model}/config.json")


def test_a_path_object_is_a_model_too(random_model: str) -> None:
    with LLM(Path(random_model), device="cpu", num_kvcache_blocks=4) as llm:  # type: ignore[arg-type]
        assert llm.generate([5, 6], use_tqdm=False)[0]["token_ids"]


def test_max_model_len_is_capped_by_the_model(random_model: str) -> None:
    assert Config(random_model, max_model_len=10**6).max_model_len == 2048
    assert Config(random_model, max_model_len=10).max_model_len == 10


def test_a_backend_that_the_device_cannot_run_is_refused_at_construction(random_model: str) -> None:
    for name in ("flash_attn", "triton"):
        with pytest.raises(ValueError, match=f"{name}.*CUDA"):
            LLM(random_model, device="cpu", attention_backend=name)


def test_several_ranks_are_not_ignored(random_model: str) -> None:
    with LLM(random_model, device="cpu", tensor_parallel_size=3, num_kvcache_blocks=4) as llm:
        assert llm.runner.parallel.size == 3


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings", "architectures"],
)  # fmt: skip
def test_a_required_field_of_the_model_that_is_missing_is_named(random_model: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LLM(changed(random_model, tmp_path / "model", **{name: None}))


@pytest.mark.parametrize("value", [0, -1, "1000", 1.5, True, [1000]])
def test_a_required_field_of_the_model_with_a_wrong_value_is_shown(
    random_model: str, tmp_path: Path, value: Any
) -> None:
    with pytest.raises(ValueError) as error:
        LLM(changed(random_model, tmp_path / "model", vocab_size=value))
    assert f"vocab_size={value!r}" in str(error.value)


def test_heads_that_cannot_be_grouped_are_refused(random_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"6 attention heads.*4 key/value heads"):
        LLM(changed(random_model, tmp_path / "model", num_key_value_heads=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization_config", {"quant_method": "fp8"}), ("hidden_act", "gelu"), ("use_sliding_window", True)],
)
def test_a_feature_of_the_model_that_is_not_supported_is_refused_by_name(
    random_model: str, tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"{name}.*not supported"):
        LLM(changed(random_model, tmp_path / "model", **{name: value}))


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "\xff\x00"])
def test_a_config_file_that_is_no_json_object_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        LLM(str(tmp_path))


def test_end_ids_are_the_union_of_config_generation_config_and_tokenizer(tiny_model: str, tmp_path: Path) -> None:
    folder = Path(changed(tiny_model, tmp_path / "model", eos_token_id=7))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    assert ModelConfig.from_folder(folder).eos_token_ids == [2, 7, 8, 9]  # 2: the tokenizer's
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert ModelConfig.from_folder(folder).eos_token_ids == [2, 7, 9]
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    assert ModelConfig.from_folder(folder).eos_token_ids == [7]
