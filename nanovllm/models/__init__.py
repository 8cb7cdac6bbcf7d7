"""The models: one file a family; `model_class` maps the `architectures` entry of a config to its class."""

from nanovllm.errors import CheckpointError
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def model_class(architecture: str) -> type[Qwen3ForCausalLM]:
    """The class for an architecture; `CheckpointError` for one that is not supported."""
    if architecture not in MODELS:
        raise CheckpointError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[architecture]
