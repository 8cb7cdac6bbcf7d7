"""nanovllm: offline LLM inference that is small enough to read and fast enough to use."""

from nanovllm.errors import CheckpointError, EngineError, OutOfMemoryError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "CheckpointError", "EngineError", "OutOfMemoryError", "SamplingParams"]
__version__ = "0.1.0"
