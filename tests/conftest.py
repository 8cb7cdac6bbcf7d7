"""Set-up of all tests: Triton's interpreter where there is no GPU, and small random Qwen3 checkpoints."""

import os
import signal
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
# small models: more threads only wait for one another
torch.set_num_threads(1)
# a shell that starts the tests in the background has Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from checkpoints import save_random_qwen3
from hypothesis import HealthCheck, settings

# HYPOTHESIS_PROFILE=nightly or --hypothesis-profile=nightly: more and new examples, and longer endurance
common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=100, derandomize=True, **common)
settings.register_profile("nightly", max_examples=2000, derandomize=False, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

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
