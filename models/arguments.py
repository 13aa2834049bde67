"""Checks of the arguments of the public API and the command line: each makes a plain value of what was given,
or raises InvalidArgument naming it."""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from vkbackend.checks import finite_number, refused, whole_number
from vkbackend.errors import InvalidArgument

HOST = "numpy"  # the name of the device that is the host itself
MAX_LAYERS = 1 << 16


def layer_count(name: str, value: Any) -> int | Literal["auto"] | None:
    """Layers on the devices: a whole number (also as text), None for "all", or "auto", as many as fit."""
    if value is None or value == "all":
        return None
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    return whole_number(name, number, 0, MAX_LAYERS, ", all, or auto for as many as fit")


def device_list(name: str, value: Any) -> tuple[str, ...] | None:
    """Devices as words, from a list of indices and names or one comma-separated string."""
    if value is None:
        return None
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, int) or not isinstance(items, Iterable):
        raise refused(name, value, "expected a list such as ['0', '1'], '0,1', or None for the best one")
    words = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | np.integer) or not str(item).strip():
            raise refused(name, value, f"{item!r} names no device; give indices, UUIDs or names")
        words.append(str(item).strip())
    if not words:
        raise InvalidArgument("the device list is empty; give at least one device, or None for the best one")
    return tuple(words)


def unlike(names: Sequence[str] | None) -> bool:
    """Whether the devices may differ in speed: several names of Vulkan devices."""
    return len(set(names or ())) > 1 and HOST not in (names or ())


def override_list(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """(regex, target) pairs from such pairs or from words REGEX=TARGET,REGEX=TARGET,..."""
    pairs = []
    words: list[str | tuple[str, str]] = []
    for item in [value] if isinstance(value, str) else value:
        words += comma_separated(item) if isinstance(item, str) else [item]
    for item in words:
        pair = item.rpartition("=")[::2] if isinstance(item, str) else tuple(item)
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise refused(name, item, "expected REGEX=CPU, REGEX=host or REGEX=INDEX")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def comma_separated(text: str) -> list[str]:
    """The words REGEX=TARGET of a list; a comma in a REGEX, as in {1,2}, separates none."""
    words: list[str] = []
    for part in text.split(","):
        if words and "=" not in words[-1]:
            words[-1] += f",{part}"
        else:
            words.append(part)
    return words


def share_list(name: str, value: Any) -> tuple[float, ...] | Literal["auto"] | None:
    """Shares as numbers, "auto" and None as they are."""
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise refused(name, value, "expected one number per device, such as [3, 1], or auto")
    shares = tuple(finite_number(name, share, 0, math.inf, " per device") for share in value)
    if not 0 < sum(shares) < math.inf:
        raise refused(name, list(shares), "the sum must be finite and above 0")
    return shares


def path_string(name: str, value: Any, what: str = "a .gguf file") -> str:
    with suppress(TypeError):
        if text := os.fsdecode(value):
            return text
    raise refused(name, value, f"expected the path of {what}")


def scaled_files(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    """(path, scale) pairs from such pairs or from paths, whose scale is 1."""
    if isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable):
        raise refused(name, value, "expected a list of files or (file, scale) pairs")
    pairs = []
    for item in value:
        path, scale = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        number = finite_number("control vector scale", scale, -math.inf, math.inf)
        pairs.append((path_string(name, path, "a .gguf file of control vectors"), number))
    return tuple(pairs)


def layer_range(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != 2:
        raise refused(name, value, "expected the first and the last layer")
    first, last = (whole_number(name, n, 0, MAX_LAYERS) for n in value)
    return first, last


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    stops = (value,) if not isinstance(value, Iterable) or isinstance(value, str) else tuple(value)
    if any(not isinstance(s, str) or not s for s in stops):
        raise refused(name, value, "expected one string or several, none of them empty")
    return stops


def token_ids(tokens: Any) -> tuple[int, ...]:
    try:
        if isinstance(tokens, bytes | bytearray):
            raise TypeError
        ids = tuple(tokens)
        if any(isinstance(token, bool) for token in ids):
            raise TypeError
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise InvalidArgument(
            f"the prompt {reprlib.repr(tokens)} is neither a text nor a sequence of token ids"
        ) from None
