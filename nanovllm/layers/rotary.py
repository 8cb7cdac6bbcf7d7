"""Tables of the rotary position embedding for every rope type that is supported.

They depend on the model's settings alone. Invariant: cos and sin are computed in fp32, whatever the type of the model,
once for all positions and all layers.
"""

import math
from typing import Any

import torch
from torch import Tensor


def rope_table(rope: dict[str, Any], head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_dim] fp32: cos of each position in the first half, sin in the second.

    Angles are position * theta^(-2i/d) (Su et al., 2021), with the frequencies changed as the rope
    type says: "linear" (Chen et al., 2023), "llama3" (Llama 3.1's scaling), "yarn" (Peng et al., 2023).
    """
    inverse = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scale = 1.0
    if rope["rope_type"] == "linear":
        inverse = inverse / rope["factor"]
    elif rope["rope_type"] == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope["rope_type"] == "yarn":
        inverse, scale = _yarn(inverse, rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scale).to(device)


def _llama3(inverse: Tensor, rope: dict[str, Any]) -> Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (kept + (1 - kept) / rope["factor"])


def _yarn(inverse: Tensor, rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Interpolated frequencies and the factor that cos and sin are multiplied with."""
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return inverse / factor * ramp + inverse * (1 - ramp), scale
