"""Checkpoint: named tensors of a folder of safetensors files, read one by one and only in the part asked for.

It knows names and shapes, nothing of models. Invariants: only safetensors are read, nothing is ever unpickled; a tensor
that is missing, of another shape, or left over and not known to be needless is an error.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.errors import CheckpointError

_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them; others, as of quantized weights, need scales


def new_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """A parameter of zeros that a checkpoint fills."""
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)


class Checkpoint:
    """The tensors under `folder`; `CheckpointError` if there are none or a file is damaged.

    Tensors that are asked for and absent are collected, so that `finish` can name all of them.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}  # those that have not been read
        self.missing: list[str] = []
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self._read_index(index)
        else:
            for path in sorted(self.folder.glob("*.safetensors")):
                self.file_of.update(dict.fromkeys(self._open(path.name).keys(), path.name))
        if not self.file_of:
            pickled = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
            hint = f"; pickled weights ({pickled[0]}) are never read, convert them to safetensors" if pickled else ""
            raise CheckpointError(f"no *.safetensors in {self.folder}{hint}")

    def read(self, target: Tensor, name: str, shape: tuple[int, ...], dim: int = 0, start: int = 0) -> None:
        """Fill `target` from the tensor `name`, which must have `shape`, from `start` on along `dim`.

        What lies past the end of the tensor, and all if it is missing, stays as it is. Of a tensor for a target on the
        device "meta" name, dtype and shape are checked.
        """
        if (file := self.file_of.pop(name, None)) is None:
            self.missing.append(name)
            return
        part = self._open(file).get_slice(name)
        found, where = tuple(part.get_shape()), self.folder / file
        if found != shape:
            raise CheckpointError(f"{where}: {name} has shape {found}, the config needs {shape}")
        if part.get_dtype() not in _DTYPES:
            raise CheckpointError(f"{where}: {name} has dtype {part.get_dtype()}: must be one of {', '.join(_DTYPES)}")
        if target.is_meta:
            return
        stop = max(start, min(start + target.shape[dim], shape[dim]))
        try:
            rows = part[tuple(slice(start, stop) if d == dim else slice(None) for d in range(len(shape)))]
        except SafetensorError as error:
            raise CheckpointError(f"{where}: {name} cannot be read: {error}") from None
        target.narrow(dim, 0, stop - start).copy_(rows)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Close the files; raise if a tensor was missing, or if one is left that no name in `ignored` ends."""
        self.files.clear()
        if self.missing:
            raise CheckpointError(f"{self.folder}: the checkpoint lacks {', '.join(self.missing)}")
        if unexpected := sorted(name for name in self.file_of if not name.endswith(ignored)):
            raise CheckpointError(f"{self.folder}: the model has no place for {', '.join(unexpected)}")

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if not all(isinstance(file, str) for file in weight_map.values()):
                raise TypeError("a file name is no string")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a valid index: {error!r}") from None
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{index}: {file!r} points outside of the model folder")
            names = set(self._open(file).keys())
            self.file_of.update((name, file) for name, f in weight_map.items() if f == file and name in names)

    def _open(self, file: str) -> Any:
        if file not in self.files:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            try:
                self.files[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from None
        return self.files[file]
