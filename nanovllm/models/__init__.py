"""The models, one file a family: `load_model` builds and fills the one that a config's `architectures` names."""

from functools import partial

import torch

from nanovllm.config import Config
from nanovllm.errors import CheckpointError
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.parallel import Parallel

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def load_model(config: Config, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> Qwen3ForCausalLM:
    """One rank's model; `CheckpointError`, before it takes memory, for a folder that cannot be used."""
    hf = config.hf
    if hf.architecture not in MODELS:
        raise CheckpointError(f"architecture {hf.architecture!r} is not supported; supported: {', '.join(MODELS)}")
    make = partial(MODELS[hf.architecture], hf, config.max_model_len, parallel, dtype)
    if config.load_format == "dummy":
        model = make(device)
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
        return model
    make(torch.device("meta")).load(Checkpoint(config.model))
    model = make(device)
    model.load(Checkpoint(config.model))
    return model
