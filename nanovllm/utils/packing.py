"""One host-to-device copy for all the small arrays of a step.

It must not know what they mean. Invariant: every array starts at a multiple of 16 bytes, as kernels expect.
"""

import numpy as np
import torch

_ALIGNMENT = 4  # int32 words: kernels are compiled anew for pointers that are not multiples of 16 bytes


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int32, float32 and int64 arrays in one transfer; dtypes and shapes are kept, starts are aligned."""
    words = [np.ascontiguousarray(a).reshape(-1).view(np.int32) for a in arrays]
    starts = np.cumsum([0, *(-(-len(w) // _ALIGNMENT) * _ALIGNMENT for w in words)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for start, w in zip(starts, words):
        host[start : start + len(w)] = w
    moved = packed.to(device, non_blocking=True)
    dtypes = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
    return [
        moved[start : start + len(w)].view(dtypes[a.dtype.name]).view(a.shape)
        for start, w, a in zip(starts, words, arrays)
    ]
