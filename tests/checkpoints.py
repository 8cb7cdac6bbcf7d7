"""Small random checkpoints for tests."""

from pathlib import Path

import torch


def save_random_qwen3(folder: Path, seed: int = 0, **fields: object) -> str:
    """An untrained Qwen3 whose greedy answers differ from token to token: wide weights, uneven norms."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "initializer_range": 0.3, "eos_token_id": 1,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **fields}))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            low, high = (0.5, 1.5) if "norm" in name else (-0.1, 0.1)
            torch.nn.init.uniform_(parameter, low, high)
    model.save_pretrained(folder)
    return str(folder)
