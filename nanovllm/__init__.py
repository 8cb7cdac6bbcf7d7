"""nanovllm: offline LLM inference that is small enough to read and fast enough to use.

What `__all__` names is the public interface; everything else may change.
"""

from nanovllm.errors import CheckpointError, EngineError, OutOfMemoryError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "CheckpointError", "EngineError", "OutOfMemoryError", "SamplingParams"]
__version__ = "0.1.0"
