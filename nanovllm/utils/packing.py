"""One host-to-device copy for all the small arrays of a step."""

import numpy as np
import torch


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int32, float32 and int64 arrays in one transfer, dtypes and shapes kept; int64 ones come first."""
    sizes = [a.size * (a.itemsize // 4) for a in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.int32) for a in arrays], out=packed.numpy())
    moved = packed.to(device, non_blocking=True)
    dtypes = {"i": torch.int32, "f": torch.float32}
    return [
        part.view(torch.int64 if a.itemsize == 8 else dtypes[a.dtype.kind]).view(a.shape)
        for part, a in zip(moved.split(sizes), arrays)
    ]
