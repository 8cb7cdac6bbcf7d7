"""Checks of the fields of a dataclass and their names; a rule stands beside the type: `Annotated[int, integer(1)]`."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, get_args


class Rule(NamedTuple):
    """What a field may hold, in words that follow "must be", and what a value that is allowed becomes."""

    words: str
    allows: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def __repr__(self) -> str:
        return self.words


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def is_list(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(is_item, value))


def integer(low: int, high: int | None = None, words: str = "") -> Rule:
    words = words or (f"an integer >= {low}" if high is None else f"an integer >= {low} and <= {high}")
    return Rule(words, lambda v: is_integer(v) and v >= low and (high is None or v <= high), int)


def real(words: str, allows: Callable[[float], bool]) -> Rule:
    return Rule(words, lambda v: is_finite(v) and allows(v), float)


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", choices.__contains__)


_FLAG = Rule("True or False", lambda v: isinstance(v, bool))


def check(values: Any, prefix: str = "") -> None:
    """Convert the fields of a dataclass that have a rule, as all of type `bool` do; `ValueError` for a wrong value.

    `None` is allowed where the type says so.
    """
    for name, rule, is_optional, default in _rules(values.__class__):
        value = getattr(values, name)
        if value is default or (value is None and is_optional):  # defaults need no check, and are most fields
            continue
        if not rule.allows(value):
            fail(prefix + name, value, rule.words + ", or None" * is_optional)
        setattr(values, name, rule.convert(value))


def reject_unknown(owner: str, given: Iterable[str], valid: Collection[str]) -> None:
    """Raise a `TypeError` for the first unknown option in `given`, naming the valid one that it looks like, if any."""
    for name in given:
        if name not in valid:
            near = "".join(f"; did you mean {other!r}?" for other in get_close_matches(name, valid, n=1, cutoff=0.55))
            raise TypeError(f"{owner} has no option {name!r}{near or '.'} Valid: {', '.join(valid)}")


def fail(name: str, value: object, words: str) -> NoReturn:
    shown = repr(value)
    raise ValueError(f"{name}={shown if len(shown) <= 500 else shown[:500] + '...'}: must be {words}")


@cache
def _rules(cls: type) -> list[tuple[str, Rule, bool, Any]]:
    """Name, rule, whether `None` is allowed, default."""
    annotated = [(f, *get_args(f.type)) for f in fields(cls) if hasattr(f.type, "__metadata__")]
    flags = [(f.name, _FLAG, False, f.default) for f in fields(cls) if f.type is bool]
    return [(f.name, rule, type(None) in get_args(kind), f.default) for f, kind, rule in annotated] + flags
