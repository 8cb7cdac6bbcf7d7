"""Model folders: what is read, and that a damaged, incomplete or foreign one is an error that names the part."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_random_qwen3
from safetensors.torch import load_file, save_file

from nanovllm import LLM, CheckpointError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7]
Q_NORM = "model.layers.0.self_attn.q_norm.weight"


def load(folder: Path | str, **options: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "num_kvcache_blocks": 4, "max_num_seqs": 4, **options})


def answer(folder: Path | str, **options: Any) -> list[int]:
    with load(folder, **options) as llm:
        return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]


@pytest.fixture
def folder(random_model: str, tmp_path: Path) -> Path:
    """A copy to damage; untied, one file of weights."""
    return Path(shutil.copytree(random_model, tmp_path / "model"))


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random_qwen3(tmp_path_factory.mktemp("tied"), num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def sharded_model(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3ForCausalLM

    target = tmp_path_factory.mktemp("sharded")
    Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).save_pretrained(target, max_shard_size="300KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return str(target)


def edit_tensors(folder: Path, add: dict[str, torch.Tensor] | None = None, remove: tuple[str, ...] = ()) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in remove}
    save_file({**tensors, **(add or {})}, path, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_folder_without_safetensors_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors in "):
        load(folder)


def test_pickled_weights_are_named_and_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never read"):
        load(folder)


def test_a_sharded_checkpoint_gives_the_tokens_of_the_whole_one(random_model: str, sharded_model: str) -> None:
    assert answer(sharded_model) == answer(random_model)


def test_shards_without_an_index_work_too(random_model: str, sharded_model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))
    (copy / "model.safetensors.index.json").unlink()
    assert answer(copy) == answer(random_model)


def test_a_shard_that_is_missing_is_named(sharded_model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load(copy)


@pytest.mark.parametrize("with_index", [True, False])
def test_tensors_of_a_missing_shard_are_named(sharded_model: str, tmp_path: Path, with_index: bool) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))
    weight_map = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    if with_index:
        edit_index(copy, lambda index: index["weight_map"].pop(Q_NORM))
    else:
        (copy / "model.safetensors.index.json").unlink()
        (copy / weight_map[Q_NORM]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks.*{Q_NORM}"):
        load(copy)


def test_an_index_that_names_a_tensor_its_shard_does_not_hold_is_an_error_with_the_tensor(
    sharded_model: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))

    def move(index: dict[str, Any]) -> None:
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"][Q_NORM] = next(f for f in files if f != index["weight_map"][Q_NORM])

    edit_index(copy, move)
    with pytest.raises(CheckpointError, match=Q_NORM):
        load(copy)


@pytest.mark.parametrize("path", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_points_outside_of_the_folder_is_refused(sharded_model: str, tmp_path: Path, path: str) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))
    shutil.copy(next(copy.glob("*.safetensors")), tmp_path / "model.safetensors")
    edit_index(copy, lambda index: index["weight_map"].update({Q_NORM: path}))
    with pytest.raises(CheckpointError, match=r"index\.json|is missing"):
        load(copy)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": null}']
)
def test_an_index_that_is_no_index_is_an_error_that_names_it(sharded_model: str, tmp_path: Path, content: str) -> None:
    copy = Path(shutil.copytree(sharded_model, tmp_path / "model"))
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_a_truncated_file_is_an_error_that_names_it(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_tensors(folder, add={Q_NORM: torch.ones(31)})
    with pytest.raises(CheckpointError, match=rf"{Q_NORM}.*\(31,\).*\(32,\)"):
        load(folder)


def test_all_parameters_that_are_missing_are_named(folder: Path) -> None:
    layer = "model.layers.1"
    names = (Q_NORM, f"{layer}.mlp.down_proj.weight", f"{layer}.self_attn.v_proj.weight", "model.norm.weight")
    edit_tensors(folder, remove=names)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert all(name in str(error.value) for name in names)
    assert "model.layers.1.self_attn.q_norm.weight" not in str(error.value)


def test_biases_that_the_config_asks_for_are_missing_by_name(folder: Path) -> None:
    edit_config(folder, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.q_proj\.bias.*2\.self_attn\.o_proj\.bias"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "score.weight"]
)
def test_a_tensor_without_a_place_in_the_model_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, add={name: torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"no place for.*{name}"):
        load(folder)


def test_layers_beyond_those_of_the_config_are_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"no place for.*model\.layers\.2\."):
        load(folder)


def test_old_rope_tables_in_the_checkpoint_are_skipped(folder: Path, random_model: str) -> None:
    edit_tensors(folder, add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert answer(folder) == answer(random_model)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3MoeForCausalLM"]])
def test_another_architecture_is_refused_by_name_although_the_tensors_match(
    folder: Path, architectures: list[str]
) -> None:
    edit_config(folder, architectures=architectures)
    with pytest.raises(CheckpointError, match=f"{architectures[0]}.*supported: Qwen3ForCausalLM"):
        load(folder)


@pytest.mark.parametrize("architectures", [[], None, "Qwen3ForCausalLM", [5]])
def test_a_config_without_a_usable_architecture_is_refused(folder: Path, architectures: Any) -> None:
    edit_config(folder, architectures=architectures)
    with pytest.raises(CheckpointError, match="architecture"):
        load(folder)


def test_a_tied_head_that_is_stored_a_second_time_is_fine(tied_model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tied_model, tmp_path / "model"))
    stored = load_file(copy / "model.safetensors")
    assert "lm_head.weight" not in stored
    edit_tensors(copy, add={"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    assert answer(copy) == answer(tied_model)


def test_an_untied_head_that_is_absent_is_an_error_with_its_name(folder: Path) -> None:
    edit_tensors(folder, remove=("lm_head.weight",))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_dtype_than_the_config_says_are_converted(folder: Path, stored: torch.dtype) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    with load(folder, dtype="float32") as llm:
        weight = llm.runner.model.embed_tokens.weight
        assert weight.dtype == torch.float32
        assert torch.equal(weight, tensors["model.embed_tokens.weight"].float())
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_model_runs_in_the_dtype_of_the_option(random_model: str, name: str) -> None:
    with load(random_model, dtype=name) as llm:
        assert {p.dtype for p in llm.runner.model.parameters()} == {getattr(torch, name)}
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8


def test_dummy_weights_need_only_the_config(random_model: str, tmp_path: Path) -> None:
    shutil.copy(f"{random_model}/config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no .*safetensors"):
        load(tmp_path)
    with load(tmp_path, load_format="dummy") as llm:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert len(output["token_ids"]) == 8
        assert output["text"] == ""
        assert all(p.isfinite().all() for p in llm.runner.model.parameters())


def torch_state() -> tuple[Any, ...]:
    empty = torch.empty(0)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()
    return (torch.get_default_dtype(), empty.dtype, empty.device, torch.get_default_device(), *modes)


@pytest.mark.parametrize("fault", ["config", "weights", "option", "memory", "none"])
def test_the_global_state_of_torch_is_unchanged_after_a_constructor(folder: Path, fault: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16"}
    if fault == "config":
        edit_config(folder, vocab_size=-1)
    if fault == "weights":
        edit_tensors(folder, remove=("model.norm.weight",))
    if fault == "option":
        options["kvcache_block_size"] = 17
    if fault == "memory":
        options["num_kvcache_blocks"] = 10**12
    before = torch_state()
    if fault == "none":
        load(folder, **options).exit()
    else:
        with pytest.raises((ValueError, RuntimeError)):
            load(folder, **options)
    assert torch_state() == before


def test_a_pool_that_does_not_fit_the_memory_is_an_out_of_memory_error(random_model: str) -> None:
    from nanovllm import OutOfMemoryError

    with pytest.raises(OutOfMemoryError, match="num_kvcache_blocks"):
        load(random_model, num_kvcache_blocks=10**9)


def test_after_a_failed_constructor_the_next_engine_works(folder: Path, random_model: str) -> None:
    edit_tensors(folder, remove=("model.norm.weight",))
    with pytest.raises(CheckpointError):
        load(folder)
    assert len(answer(random_model)) == 8


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused_by_name(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, add={Q_NORM: torch.ones(32).to(dtype)})
    with pytest.raises(CheckpointError, match=rf"{Q_NORM} has dtype .*must be one of F64, F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected", "truncated", "dtype"])
def test_a_bad_checkpoint_is_found_before_it_takes_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    edit_config(folder, num_hidden_layers=2 if fault == "unexpected" else 3)
    if fault == "shape":
        edit_config(folder, vocab_size=2**31 - 1, intermediate_size=10**8)  # terabytes
    if fault == "missing":
        edit_tensors(folder, remove=("model.norm.weight",))
    if fault == "dtype":
        edit_tensors(folder, add={Q_NORM: torch.ones(32, dtype=torch.int32)})
    if fault == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    zeros, devices = torch.zeros, set()

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        devices.add(str(options.get("device")))
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", watched)
    with pytest.raises(CheckpointError):
        load(folder)
    assert devices <= {"meta"}


class Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('pathlib').Path(__import__('os').environ['CANARY']).write_text('unpickled')",)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "tokenizer.json", "vocab.json"])
def test_nothing_of_a_checkpoint_is_unpickled(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copy, canary = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(canary))
    torch.save(Canary(), copy / name)
    torch.load(shutil.copy(copy / name, tmp_path / "pickle.pt"), weights_only=False)
    assert canary.read_text() == "unpickled"
    canary.unlink()
    try:
        with load(copy) as llm:
            llm.generate("hello", GREEDY, use_tqdm=False)
    except ValueError as error:
        assert name in str(error) or "tokenizer" in str(error)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_the_folder_is_never_run(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    copy, canary = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "canary"
    (copy / "custom.py").write_text(f"open({str(canary)!r}, 'w')\nclass Custom: pass\n")
    settings = json.loads((copy / file).read_text())
    names = {"AutoModelForCausalLM": "custom.Custom", "AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    (copy / file).write_text(json.dumps({**settings, "tokenizer_class": "Custom", "auto_map": names}))
    if file != "config.json":
        edit_config(copy, model_type="custom")  # one that transformers does not know
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    try:
        with load(copy) as llm:
            llm.generate("hello", GREEDY, use_tqdm=False)
        assert file != "config.json"
    except ValueError as error:
        assert "auto_map" in str(error) or "trust_remote_code" in str(error)
    assert not canary.exists()


def test_a_model_with_more_ids_than_its_tokenizer_gives_text_without_them(tiny_model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit_config(copy, vocab_size=1100)
    stored = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(copy, add={"model.embed_tokens.weight": torch.cat([stored, stored[:76]])})
    beyond = SamplingParams(allowed_token_ids=[1050, 1099], max_tokens=6, ignore_eos=True, stop="x")
    with load(copy) as llm:
        (output,) = llm.generate("hello", beyond, use_tqdm=False)
        assert len(output["token_ids"]) == 6 and min(output["token_ids"]) >= 1050
        assert output["text"] == ""
        assert "".join(piece["text"] for piece in llm.stream("hello", beyond)) == ""


def test_a_tokenizer_with_more_ids_than_its_model_is_refused_where_it_matters(tiny_model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit_config(copy, vocab_size=900)
    stored = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(copy, add={"model.embed_tokens.weight": stored[:900].clone()})
    with load(copy) as llm:
        ids = next([i] for i in range(900, 1024) if llm.tokenizer.encode(llm.tokenizer.decode([i])) == [i])
        assert len(llm.generate("hello", GREEDY, use_tqdm=False)[0]["token_ids"]) == 8
        with pytest.raises(ValueError, match=rf"prompt 1: prompt holds token id {ids[0]}: must be in 0\.\.899"):
            llm.generate(["hello", llm.tokenizer.decode(ids)], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "NoSuch"}}', '{"added_tokens": 5}',
        '{"added_tokens": [7]}', '{"added_tokens": [{"content": "<|im_end|>"}]}',
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_an_error_that_leaves_ids(
    tiny_model: str, tmp_path: Path, content: str
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit = json.loads((copy / "tokenizer_config.json").read_text())
    edit.pop("eos_token")  # else the file is read for its id, and refused as a part of the model
    (copy / "tokenizer_config.json").write_text(json.dumps(edit))
    (copy / "tokenizer.json").write_text(content)
    with load(copy) as llm:
        with pytest.raises(ValueError, match="no usable tokenizer"):
            llm.generate("hello", GREEDY, use_tqdm=False)
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8
    (copy / "tokenizer_config.json").write_text(json.dumps({**edit, "eos_token": "<|im_end|>"}))
    with pytest.raises((CheckpointError, ValueError)), load(copy) as llm:
        llm.generate("hello", GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "name", ["rope_parameters", "rope_scaling", "eos_token_id", "torch_dtype", "head_dim", "rms_norm_eps"]
)
@pytest.mark.parametrize(
    "value", ["x", [], {}, [None], {"a": 1}, {"rope_type": [1]}, {"rope_theta": -1}, -1, 1e400, True]
)
def test_a_field_of_the_config_with_nonsense_is_a_checkpoint_error_or_has_no_effect(
    folder: Path, name: str, value: Any
) -> None:
    edit_config(folder, **{name: value})
    try:
        load(folder).exit()
    except CheckpointError as error:
        assert name.split("_")[0] in str(error) or "shape" in str(error)
