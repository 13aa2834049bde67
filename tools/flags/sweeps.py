"""Expand llama-bench's lists and ranges. If several flags have lists, `bench` measures all combinations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product

from vkbackend.errors import InvalidArgument

RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
MAX_VALUES = 1024  # of a range

LISTS = {  # flag -> its short form, which names a column
    "--batch-size": "-b", "--ubatch-size": "-ub", "--cache-type-k": "-ctk", "--cache-type-v": "-ctv",
    "--n-gpu-layers": "-ngl", "--gpu-layers": "-ngl", "--split-mode": "-sm", "--main-gpu": "-mg",
    "--n-cpu-moe": "-ncmoe", "--load-mode": "-lm",
}  # fmt: skip
SWITCHES = {"-nkvo": ("", "-nkvo"), "--no-kv-offload": ("", "-nkvo"), "-mmp": ("--no-mmap", ""),
            "--mmap": ("--no-mmap", "")}  # fmt: skip
SHARES = ("-ts", "--tensor-split")
DEVICES, OVERRIDES = ("-dev", "--device"), ("-ot", "--override-tensor")


def lines_of(words: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Expand a line of `bench` into command lines, each with the values of its swept flags."""
    parts: list[list[tuple[list[str], dict[str, str]]]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, _, joined = word.partition("=")
        if not joined and (not rest or flag not in {*LISTS, *LISTS.values(), *SWITCHES, *SHARES, *DEVICES,
                                                    *OVERRIDES}):  # fmt: skip
            parts.append([([word], {})])
            continue
        if flag in SWITCHES:
            values = rest[0].split(",") if not joined and rest else joined.split(",")
            if not set(values) <= {"0", "1"}:
                parts.append([([word], {})])  # has no value
                continue
            if not joined:
                rest.pop(0)
            words_of = [[switch] if (switch := SWITCHES[flag][int(v)]) else [] for v in values]
            parts.append(_choices(flag, values, words_of))
        elif flag in LISTS or flag in LISTS.values():
            values = values_of(flag, joined or rest.pop(0))
            parts.append(_choices(LISTS.get(flag, flag), values, [[flag, value] for value in values]))
        elif flag in SHARES:
            text = joined or rest.pop(0)
            values = text.split(",") if "/" in text else [text]
            parts.append(_choices("-ts", values, [[flag, value] for value in values]))
        elif flag in DEVICES:
            text = joined or rest.pop(0)
            values = text.split(",") if "/" in text else [text]
            parts.append(_choices("-dev", values, [[flag, value.replace("/", ",")] for value in values]))
        elif flag in OVERRIDES:
            parts.append([([flag, (joined or rest.pop(0)).replace(";", ",")], {})])
        else:
            parts.append([([word], {})])
    return [
        ([word for part, _ in line for word in part], {k: v for _, swept in line for k, v in swept.items()})
        for line in product(*parts)
    ]


def values_of(flag: str, text: str) -> list[str]:
    """Return the values of a list, for example 4,8 or 4-16, 4-16+4 and 4-16*2, as in llama-bench. Raises
    InvalidArgument."""
    values: list[str] = []
    for word in text.split(","):
        if not (match := RANGE.fullmatch(word.strip())):
            values.append(word)
            continue
        value, last, step = int(match[1]), int(match[2]), int(match[4] or 1)
        if (value * step if match[3] == "*" else value + step) <= value:
            raise InvalidArgument(f"{flag} {word}: the range does not grow; give FIRST-LAST+STEP or *FACTOR")
        while value <= last:
            values.append(str(value))
            if len(values) > MAX_VALUES:
                raise InvalidArgument(f"{flag} {word}: a range has at most {MAX_VALUES} values")
            value = value * step if match[3] == "*" else value + step
    if not values:
        raise InvalidArgument(f"{flag} {text}: the range is empty; the first value is above the last")
    return values


def notes_of(words: Sequence[str]) -> list[str]:
    """Return a note for each flag whose commas have another meaning in llama-bench."""
    flags = (*DEVICES, *SHARES, *OVERRIDES)
    pairs = [(flag, value) for flag, value in pairwise(words) if flag in flags and "," in value]
    return [
        f"{flag} {value} is one test with all of them; in llama-bench a comma separates tests, and "
        f"{';' if flag in OVERRIDES else '/'} what one test has"
        for flag, value in pairs
        if not {"/", ";"} & set(value)
    ]


def _choices(
    flag: str, values: Sequence[str], words: Sequence[list[str]]
) -> list[tuple[list[str], dict[str, str]]]:
    several = len(values) > 1
    return [(line, {flag: value} if several else {}) for value, line in zip(values, words, strict=True)]
