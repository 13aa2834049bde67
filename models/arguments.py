"""Checks arguments of the public API and the command line. A check returns a plain value, or raises
InvalidArgument with the argument's name."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from vkbackend.checks import finite_number, items, number_of, plain, refused, shown, whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.ops import CACHE_TYPES

HOST = "numpy"  # the name of the device that runs on the processor
MAX_LAYERS = 1 << 16
MAX_CONTINUATIONS = 1024
SPECULATIONS = ("ngram", "mtp", "draft", "eagle3")
ONLY_EMBEDS = "this model is an encoder: it computes embeddings (embed, rerank), and cannot generate text"
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's pattern for -cmoe
MAX_INDEX = (1 << 63) - 1  # larger than any device index or token id


def text_of(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "expected a str")
    return value


def layer_count(name: str, value: Any) -> int | Literal["auto"] | None:
    """None means all layers, and "auto" means as many as fit (-1 in llama.cpp)."""
    given = plain(value)
    if isinstance(given, str):
        if given == "auto":
            return "auto"
        given = None if given == "all" else number_of(given)
    if given is None:
        return None
    number = whole_number(name, given, -1, MAX_LAYERS, ", all, or auto (-1) for as many as fit")
    return "auto" if number == -1 else number


def mebibytes(name: str, value: Any) -> float | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return finite_number(name, value, 0, 1 << 40, ", in MiB, or auto")


# The options that `fit` chooses, each with the values that leave the choice to `fit`.
FITTED: dict[str, tuple[object, ...]] = {
    "n_ctx": (0,),
    "n_slots": (-1,),
    "kv_cells": (None,),
    "n_ubatch": (0,),
    "type_k": (),
    "type_v": (),
    "n_gpu_layers": ("auto", "-1", -1),
    "tensor_split": (None, "auto"),
    "override_tensor": ((), []),
    "moe_cache_mib": ("auto",),
}


def fitted_names(name: str, value: Any) -> tuple[str, ...]:
    given = plain(value)
    if given is None or isinstance(given, bool):
        return tuple(FITTED) if given else ()
    names = items(name, value, f"expected True, False, or a list of {', '.join(FITTED)}")
    if wrong := [word for word in names if not isinstance(word, str) or word not in FITTED]:
        raise refused(name, wrong[0], f"not an option that fit chooses; there are: {', '.join(FITTED)}")
    return tuple(names)


def not_given(options: Mapping[str, Any]) -> list[str]:
    """Return the options that `fit` may choose if the user gave `options`."""
    return [
        name
        for name, choices in FITTED.items()
        if name not in options or any(type(options[name]) is type(c) and options[name] == c for c in choices)
    ]


def margin_list(name: str, value: Any) -> tuple[float, ...]:
    """Read MiB per device: a number, several, or the text 512,1024."""
    expected = "expected MiB, one number or one per device"
    given = plain(value)
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = [given]
    words = given.split(",") if isinstance(given, str) else items(name, given, expected)
    numbers = []
    for word in words:
        with suppress(ValueError):
            word = float(word) if isinstance(word, str) else word
        numbers.append(finite_number(name, word, 0, 1 << 40, ", in MiB"))
    if not numbers:
        raise refused(name, value, expected)
    return tuple(numbers)


def device_list(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    expected = "expected a list such as ['0', '1'], '0,1', or None for the best one"
    given = plain(value)
    words = []
    for item in given.split(",") if isinstance(given, str) else items(name, value, expected):
        device = plain(item)
        if isinstance(device, int) and not isinstance(device, bool) and abs(device) <= MAX_INDEX:
            device = str(device)
        if not isinstance(device, str) or not device.strip():
            raise refused(name, value, f"{shown(item)} is not a device; give indices, UUIDs or names")
        words.append(device.strip())
    if not words:
        raise InvalidArgument("the device list is empty; give at least one device, or None for the best one")
    return tuple(words)


def one_device(name: str, value: Any) -> str | None:
    devices = device_list(name, value if value is None or isinstance(value, str) else [value])
    if devices is not None and len(devices) > 1:
        raise refused(name, value, "expected one device")
    return devices[0] if devices else None


def unlike(names: Sequence[str] | None) -> bool:
    """Return whether the devices may differ in speed: several different devices, and no numpy devices."""
    return len(set(names or ())) > 1 and HOST not in [name.rpartition("/")[2] for name in names or ()]


def override_list(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Read (regex, target) pairs, or the text REGEX=TARGET,REGEX=TARGET,..."""
    expected = "expected REGEX=CPU, REGEX=host or REGEX=INDEX"
    pairs: list[tuple[str, str]] = []
    for item in [value] if isinstance(value, str) else items(name, value, expected):
        if isinstance(item, str):
            words = [word.rpartition("=")[::2] for word in comma_separated(item)]
        else:
            words = [_pair(name, item, expected)]
        if not all(regex and target for regex, target in words):
            raise refused(name, item, expected)
        pairs += words
    return tuple(pairs)


def _pair(name: str, item: Any, expected: str) -> tuple[str, str]:
    pair = [plain(part) for part in items(name, item, expected)]
    if len(pair) == 2 and isinstance(pair[1], int) and not isinstance(pair[1], bool):
        pair[1] = str(whole_number(name, pair[1], 0, MAX_INDEX))
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise refused(name, item, expected)
    return pair[0], pair[1]


def comma_separated(text: str) -> list[str]:
    """Split `text` at commas, except the commas inside a REGEX such as {1,2}."""
    words: list[str] = []
    for part in text.split(","):
        if words and "=" not in words[-1]:
            words[-1] += f",{part}"
        else:
            words.append(part)
    return words


def share_list(name: str, value: Any) -> tuple[float, ...] | Literal["auto"] | None:
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    given = items(name, value, "expected one number per device, such as [3, 1], or auto")
    shares = tuple(finite_number(name, share, 0, math.inf, " per device") for share in given)
    if not 0 < sum(shares) < math.inf:
        raise refused(name, list(shares), "the sum must be finite and above 0")
    return shares


def path_string(name: str, value: Any, kind: str = "a .gguf file") -> str:
    with suppress(TypeError):
        if (text := os.fsdecode(value)) and "\0" not in text:
            return text
    raise refused(name, value, f"expected the path of {kind}")


def optional_path(kind: str) -> Callable[[str, Any], str | None]:
    return lambda name, value: None if value is None else path_string(name, value, kind)


def scaled_files(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    pairs = []
    for item in items(name, value, "expected a list of files or (file, scale) pairs"):
        path, scale = item if isinstance(item, tuple | list) and len(item) == 2 else (item, 1.0)
        number = finite_number("control vector scale", scale, -math.inf, math.inf)
        pairs.append((path_string(name, path, "a .gguf file of control vectors"), number))
    return tuple(pairs)


MAX_FILES, MAX_SCALE = 64, 1e6


def adapter_files(name: str, value: Any) -> tuple[tuple[str, str, float], ...]:
    """Return (name, path, scale) of each adapter. An adapter without a name is named after its file, without
    .gguf."""
    expected = "expected files, (file, scale) pairs, or a dict of these by name"
    if isinstance(value, str | os.PathLike):
        value = [value]
    named = value.items() if isinstance(value, Mapping) else [(None, v) for v in items(name, value, expected)]
    adapters = []
    for word, entry in named:
        if isinstance(entry, tuple | list) and len(entry) == 3:
            word, *entry = entry
        path, scale = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, 1.0)
        path = path_string(name, path, "a LoRA adapter: a .gguf file or a PEFT folder")
        if word is None:
            word = os.path.basename(os.path.abspath(path)).removesuffix(".gguf")
        if not isinstance(word, str) or not word or len(word) > 200 or not word.isprintable():
            raise refused(name, word, "an adapter's name must be a text of 1 to 200 printable characters")
        adapters.append((word, path, adapter_scale(name, scale)))
    names = [word for word, _, _ in adapters]
    if twice := next((word for word in names if names.count(word) > 1), None):
        raise refused(name, twice, "two adapters have this name; name them: {'first': file, 'second': file}")
    if len(adapters) > MAX_FILES:
        raise refused(name, f"{len(adapters)} files", f"expected at most {MAX_FILES} adapters")
    return tuple(adapters)


def adapter_scale(name: str, value: Any) -> float:
    return finite_number(f"{name} scale", value, -MAX_SCALE, MAX_SCALE)


def adapter_scales(name: str, value: Any) -> tuple[tuple[str | int, float], ...] | None:
    """Return (name or number of the adapter, scale). None means the default scales."""
    if value is None:
        return None
    expected = "expected a dict of scales by adapter, or (adapter, scale) pairs"
    pairs = []
    for item in value.items() if isinstance(value, Mapping) else items(name, value, expected):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise refused(name, value, expected)
        adapter = plain(item[0])
        if not isinstance(adapter, str):
            adapter = whole_number(f"{name} adapter", adapter, 0, MAX_FILES)
        pairs.append((adapter, adapter_scale(name, item[1])))
    return tuple(pairs)


def layer_range(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    expected = "expected the first and the last layer"
    given = items(name, value, expected)
    if len(given) != 2:
        raise refused(name, value, expected)
    first, last = (whole_number(name, n, 0, MAX_LAYERS) for n in given)
    return first, last


def speculation_list(name: str, value: Any) -> tuple[str, ...]:
    """Read names of drafters. The names of llama.cpp are accepted too. "none" and None mean no drafts."""
    if value is None:
        return ()
    expected = f"expected {', '.join(SPECULATIONS)} or none, or several of them"
    words: list[str] = []
    for item in value.split(",") if isinstance(value, str) else items(name, value, expected):
        word = plain(item)
        word = word.strip().removeprefix("draft-") if isinstance(word, str) else ""
        word = {"simple": "draft", "default": "ngram"}.get(word, word)
        word = "ngram" if word.startswith("ngram-") else word
        if word not in (*SPECULATIONS, "none"):
            raise refused(name, value, expected)
        if word != "none" and word not in words:
            words.append(word)
    return tuple(words)


def token_limit(name: str, value: Any) -> int | None:
    """None and -1 mean no limit."""
    if value is None:
        return None
    number = whole_number(name, value, -1, 1 << 62, ", or None or -1 for no limit")
    return None if number == -1 else number


def continuation_count(name: str, value: Any) -> int | None:
    return None if value is None else whole_number(name, value, 1, MAX_CONTINUATIONS)


def slot_number(name: str, value: Any, n_slots: int) -> int:
    return whole_number(name, value, 0, n_slots - 1, " (n_slots says how many there are)")


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    expected = "expected one string or several, none of them empty"
    given = plain(value)
    if given is None:
        return ()
    stops = (given,) if isinstance(given, str) else tuple(items(name, value, expected))
    if any(not isinstance(s, str) or not s for s in stops):
        raise refused(name, value, expected)
    return stops


def token_ids(name: str, value: Any, expected: str = "expected a sequence of token ids") -> tuple[int, ...]:
    ids = []
    for item in items(name, value, expected):
        try:
            if isinstance(item, bool):
                raise TypeError
            ids.append(operator.index(item))
        except TypeError:
            raise refused(name, value, f"{expected}; {shown(item)} is not one") from None
        if abs(ids[-1]) > MAX_INDEX:
            raise refused(name, value, f"{expected}; {shown(item)} is out of range")
    return tuple(ids)


def cache_type(name: str, value: Any) -> str:
    word = plain(value)
    if not isinstance(word, str) or word not in CACHE_TYPES:
        raise refused(name, value, f"not a cache type; there are: {', '.join(CACHE_TYPES)}")
    return word
