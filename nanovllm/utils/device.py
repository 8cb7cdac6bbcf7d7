"""Which device, dtype and stream an engine runs on, the memory of the host, and a warning where a GPU lies idle.

It reads options and the machine and must not change either.
"""

import functools
import os
import threading
import warnings

import numpy as np
import torch

from nanovllm.config import Config

# There if the driver of an NVIDIA GPU is loaded.
NVIDIA_DRIVER = "/dev/nvidiactl"


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': no CUDA device is available; use device='cpu' or 'auto'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def warn_if_slow(config: Config, device: torch.device, fits_graphs: bool) -> None:
    """Warn of what is far slower than this machine allows and was probably not meant."""
    reason, hidden = "", os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if device.type == "cpu" and config.device == "auto" and not hidden and os.path.exists(NVIDIA_DRIVER):
        reason = (
            f"device='auto' runs on the CPU although there is an NVIDIA GPU: torch {torch.__version__} cannot use it; "
            "install a CUDA build of torch that fits the driver, or say device='cpu' if it is meant"
        )
    if device.type == "cuda" and not fits_graphs and not config.enforce_eager:
        reason = (
            f"attention_backend={config.attention_backend!r} rules out CUDA graphs, which makes decode several times "
            "slower; use 'auto', or say enforce_eager=True if it is meant"
        )
    if reason:
        warnings.warn(reason, stacklevel=2)


def pick_dtype(config: Config, device: torch.device) -> torch.dtype:
    default = config.hf.dtype if device.type == "cuda" else "float32"
    return getattr(torch, default if config.dtype == "auto" else config.dtype)


# Held while an engine is built, captures or frees its memory: a capture fails if another thread waits for the device,
# and only one thread at a time can compile ahead.
exclusive = threading.RLock()


@functools.lru_cache
def graph_stream(device: torch.device) -> torch.cuda.Stream:
    """For captures, one for all engines of the process: cuBLAS keeps 32 MiB for each that it was ever called on."""
    return torch.cuda.Stream(device)


def free_host_bytes() -> int:
    """What programs can have: what caches of files take counts as free, where the system tells (Linux)."""
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":") for line in lines)
        return int(found["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves zeroing to the system, page by page on first use; torch would write gigabytes at start-up
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype).squeeze(-1)
