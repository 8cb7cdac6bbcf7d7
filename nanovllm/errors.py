"""The error types a caller may want to catch, and the helper that words an unknown option."""

from collections.abc import Iterable
from difflib import get_close_matches


class EngineError(RuntimeError):
    """The engine cannot do this: it was closed, another thread uses it, or a step or a worker failed."""


class OutOfMemoryError(EngineError):
    """The device has too little memory; the message says what was needed, what there is and what helps."""


class CheckpointError(ValueError):
    """A model folder that cannot be used; the message names the file, field or tensor."""


def reject_unknown(owner: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raise a `TypeError` naming the nearest valid option for the first unknown one in `given`."""
    valid = list(valid)
    for name in given:
        if name not in valid:
            near = get_close_matches(name, valid, n=1, cutoff=0.0)[0]
            raise TypeError(f"{owner} has no option {name!r}; did you mean {near!r}? Valid: {', '.join(valid)}")
