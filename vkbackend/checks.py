"""Checks of what a caller gives: each returns a plain value, or raises InvalidArgument that names the
parameter."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from vkbackend.errors import InvalidArgument


def refused(name: str, value: Any, expected: str) -> InvalidArgument:
    """The error for a value of the parameter `name`."""
    return InvalidArgument(f"{name}={value!r}: {expected}", argument=name)


def whole_number(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    """`value` as an int in low..high; InvalidArgument names the value. True and 3.0 are no whole numbers
    here.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise refused(name, value, f"expected a whole number in {low}..{high}{hint}")
    return number


def finite_number(name: str, value: Any, low: float, high: float, hint: str = "") -> float:
    """`value` as a finite float in low..high; InvalidArgument names the value."""
    number = math.nan
    if not isinstance(value, bool | str | bytes):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    if not low <= number <= high or math.isinf(number):  # NaN compares false
        upper = f"..{high:g}" if math.isfinite(high) else " or more"
        raise refused(name, value, f"expected a finite number, {low:g}{upper}{hint}")
    return number


# ---- checks of a field: (name, value) -> plain value ----


def whole(low: int, high: int, hint: str = "") -> Callable[[str, Any], int]:
    return lambda name, value: whole_number(name, value, low, high, hint)


def finite(low: float, high: float, hint: str = "") -> Callable[[str, Any], float]:
    return lambda name, value: finite_number(name, value, low, high, hint)


def choice(known: Sequence[str]) -> Callable[[str, Any], str]:
    """One of the words `known`."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refused(name, value, f"expected a word, one of {', '.join(known)}")
        if value not in known:
            what = name.replace("_", " ")
            raise InvalidArgument(f"{what} {value!r} is unknown; there are: {', '.join(known)}")
        return value

    return check


def switch(name: str, value: Any) -> bool:
    return bool(value)
