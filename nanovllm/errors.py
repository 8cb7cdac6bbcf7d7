"""The error types a caller may want to catch."""


class EngineError(RuntimeError):
    """The engine cannot do this: it was closed, another thread uses it, or a step or a worker failed."""


class OutOfMemoryError(EngineError):
    """The device has too little memory; the message says what was needed, what there is and what helps."""


class CheckpointError(ValueError):
    """A model folder that cannot be used; the message names the file, field or tensor."""
