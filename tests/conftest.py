"""Set-up of all tests: Triton's interpreter where there is no GPU, and small random Qwen3 checkpoints."""

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
# small models: more threads only wait for one another
torch.set_num_threads(1)

import pytest
from checkpoints import save_random_qwen3

TINY = Path(__file__).parents[1] / "nanovllm" / "assets" / "tiny-qwen3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def tiny_model() -> str:
    """The trained checkpoint that ships with the package."""
    return str(TINY)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained Qwen3 with 3 KV heads, 1,000 ids, 2,048 positions and no tokenizer."""
    return save_random_qwen3(tmp_path_factory.mktemp("random-qwen3"))
