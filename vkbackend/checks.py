"""Checks of arguments. Each check returns a plain Python value or raises InvalidArgument.

The checks accept numpy scalars as numbers and numpy arrays as lists.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from vkbackend.errors import InvalidArgument

T = TypeVar("T")
MAX_SHOWN = 200  # characters of a value that a message shows


def refused(name: str, value: Any, expected: str) -> InvalidArgument:
    return InvalidArgument(f"{name}={shown(value)}: {expected}", argument=name)


def shown(value: Any) -> str:
    """Return `repr(value)` as one line, truncated after MAX_SHOWN characters."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception:  # repr raises for integers above 4300 digits, and may raise for any class
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{bits}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def plain(value: Any) -> Any:
    """Convert a numpy scalar or 0-d array to a Python object, and return other values unchanged."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def whole_number(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    """Raises InvalidArgument for values outside `low`..`high`, bools and floats."""
    number, given = None, plain(value)
    if not isinstance(given, bool):
        with suppress(TypeError):
            number = operator.index(given)
    if number is None or not low <= number <= high:
        raise refused(name, value, f"expected a whole number in {low}..{high}{hint}")
    return number


def finite_number(name: str, value: Any, low: float, high: float, hint: str = "") -> float:
    number, given = math.nan, plain(value)
    if not isinstance(given, bool | str | bytes | np.ndarray):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(given)
    if not low <= number <= high or math.isinf(number):  # NaN compares false
        upper = f"..{high:g}" if math.isfinite(high) else " or more"
        raise refused(name, value, f"expected a finite number, {low:g}{upper}{hint}")
    return number


def number_of(text: str) -> int | str:
    """Convert 1 to 20 digits with an optional minus sign to an int, and return other text unchanged."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else text


def items(name: str, value: Any, expected: str) -> list[Any]:
    """Raises InvalidArgument for text and values that are not iterable."""
    if not isinstance(value, str | bytes | bytearray):
        with suppress(TypeError):
            return list(value)
    raise refused(name, value, expected)


# ---- checks of one field ----


def whole(low: int, high: int, hint: str = "") -> Callable[[str, Any], int]:
    return lambda name, value: whole_number(name, value, low, high, hint)


def optional(check: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if plain(value) is None else check(name, value)


def finite(low: float, high: float, hint: str = "") -> Callable[[str, Any], float]:
    return lambda name, value: finite_number(name, value, low, high, hint)


def choice(known: Sequence[str]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        word = plain(value)
        if not isinstance(word, str):
            raise refused(name, value, f"expected a word, one of {', '.join(known)}")
        if word not in known:
            label = name.replace("_", " ")
            raise InvalidArgument(f"{label} {shown(word)} is unknown; there are: {', '.join(known)}")
        return word

    return check


def switch(name: str, value: Any) -> bool:
    given = plain(value)
    if not isinstance(given, int) or given not in (0, 1):
        raise refused(name, value, "expected True or False")
    return bool(given)
