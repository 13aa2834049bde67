"""Checks of what callers give: each returns the value in a plain form or raises InvalidArgument naming it."""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from vkbackend.errors import InvalidArgument

HOST = "numpy"  # the name of the device that is the host itself
MAX_AHEAD = 1 << 16  # segments of a step; no step has as many
MAX_LAYERS = 1 << 16


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


def ahead_depth(text: str, name: str = "submit_ahead") -> int | None:
    """Segments submitted ahead: a number, or "all" (None)."""
    if text == "all":
        return None
    return whole_number(name, int(text) if text.isdecimal() else text, 0, MAX_AHEAD, " or all")


def layer_count(name: str, value: Any) -> int | str | None:
    """Layers on the devices: a whole number (also as text), None for "all", or "auto", as many as fit."""
    if value is None or value == "all":
        return None
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    return whole_number(name, number, 0, MAX_LAYERS, ", all, or auto for as many as fit")


def device_list(devices: str | Sequence[str | int] | None) -> tuple[str, ...] | None:
    """Devices as words, from a list of indices and names or one comma-separated string."""
    if devices is None:
        return None
    items = devices.split(",") if isinstance(devices, str) else devices
    if isinstance(items, int) or not isinstance(items, Iterable):
        raise refused(
            "devices", devices, "expected a list such as ['0', '1'], '0,1', or None for the best one"
        )
    words = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | np.integer) or not str(item).strip():
            raise refused("devices", devices, f"{item!r} names no device; give indices, UUIDs or names")
        words.append(str(item).strip())
    if not words:
        raise InvalidArgument("the device list is empty; give at least one device, or None for the best one")
    return tuple(words)


def unlike(names: Sequence[str] | None) -> bool:
    """Whether the devices may differ in speed: several names of Vulkan devices."""
    return len(set(names or ())) > 1 and HOST not in (names or ())


def override_list(items: Sequence[str | tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(regex, target) pairs from such pairs or from words REGEX=TARGET,REGEX=TARGET,..."""
    pairs = []
    words: list[str | tuple[str, str]] = []
    for item in [items] if isinstance(items, str) else items:
        words += comma_separated(item) if isinstance(item, str) else [item]
    for item in words:
        pair = item.rpartition("=")[::2] if isinstance(item, str) else tuple(item)
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise refused("override_tensor", item, "expected REGEX=CPU, REGEX=host or REGEX=INDEX")
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


def share_list(
    tensor_split: Sequence[float] | str | None, devices: tuple[str, ...] | None
) -> tuple[float, ...] | None:
    if tensor_split is None:
        return None
    if isinstance(tensor_split, str | bytes) or not isinstance(tensor_split, Iterable):
        raise refused("tensor_split", tensor_split, "expected one number per device, such as [3, 1]")
    shares = tuple(finite_number("tensor_split", share, 0, math.inf, " per device") for share in tensor_split)
    n_devices = 1 if devices is None else len(devices)
    if len(shares) != n_devices:
        raise refused(
            "tensor_split",
            list(shares),
            f"{len(shares)} shares for {n_devices} devices{'' if devices else ', the best one'}; "
            "give one for each",
        )
    if not 0 < sum(shares) < math.inf:
        raise refused("tensor_split", list(shares), "the sum must be finite and above 0")
    return shares


def path_string(path: str | os.PathLike[str], what: str = "a .gguf file") -> str:
    with suppress(TypeError):
        if text := os.fsdecode(path):
            return text
    raise refused("path", path, f"expected the path of {what}")


def scaled_files(
    files: Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]],
) -> tuple[tuple[str, float], ...]:
    """(path, scale) pairs from such pairs or from paths, whose scale is 1."""
    if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable):
        raise refused("control_vectors", files, "expected a list of files or (file, scale) pairs")
    pairs = []
    for item in files:
        path, scale = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        number = finite_number("control vector scale", scale, -math.inf, math.inf)
        pairs.append((path_string(path, "a .gguf file of control vectors"), number))
    return tuple(pairs)


def layer_range(layers: tuple[int, int] | None) -> tuple[int, int] | None:
    if layers is None:
        return None
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence) or len(layers) != 2:
        raise refused("control_vector_layer_range", layers, "expected the first and the last layer")
    first, last = (whole_number("control_vector_layer_range", n, 0, 1 << 16) for n in layers)
    return first, last


def word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "expected a word")
    return value


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if not isinstance(stop, Iterable) or isinstance(stop, str) else tuple(stop)
    if any(not isinstance(s, str) or not s for s in stops):
        raise refused("stop", stop, "expected one string or several, none of them empty")
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
