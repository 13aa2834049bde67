"""Reads all environment variables (docs/env_vars.md).

`DEBUG=1` prints devices, the plan and fallbacks. Higher levels add dispatch times (2), barriers and
submissions (3), compiled shader variants (4) and intermediate values (5).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from vkbackend.errors import InvalidArgument
from vkbackend.system.files import user_cache
from vkbackend.system.processors import usable_cores


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidArgument(
            f"{name}={text!r} is not a whole number; unset it or set e.g. {name}={default}"
        ) from None


def debug() -> int:
    return _integer("DEBUG", 0)


# Optional features, as named in vulkan/capabilities.py.
FEATURES = frozenset(
    "buffer_address cooperative_matrix cooperative_matrix_nv denorm_float16 device_map "
    "executable_info float16 full_subgroups host_import int8 int8_units_fast int_dot int_dot_accelerated "
    "memory_budget memory_model memory_model_device robust_buffer_access rte_float16 storage16 "
    "storage8 subgroup_arithmetic subgroup_max subgroup_min subgroup_shuffle subgroup_size_control "
    "timeline".split()
)


def disabled() -> frozenset[str]:
    """Return the features in VKBACKEND_DISABLE. Raises InvalidArgument for an unknown feature."""
    names = frozenset(filter(None, map(str.strip, os.environ.get("VKBACKEND_DISABLE", "").split(","))))
    if unknown := names - FEATURES:
        raise InvalidArgument(
            f"VKBACKEND_DISABLE names no feature: {', '.join(sorted(unknown))}; "
            f"there are: {', '.join(sorted(FEATURES))}"
        )
    return names


def without_gpu() -> bool:
    """Return whether Mesa's RADV compiles shaders without an AMD GPU. In this mode, RADV of Mesa 25.0 crashes
    if it is asked for the memory budget (GFX1201, GFX1151, NAVI33)."""
    return bool(os.environ.get("RADV_FORCE_FAMILY"))


FUSE = "VKBACKEND_FUSE"


def fusing() -> bool:
    """Return whether to fuse ops. Without fusion, every intermediate value is in memory."""
    return os.environ.get(FUSE, "") != "0"


REPEAT = "VKBACKEND_REPEAT"


def repeating() -> bool:
    """Return whether to record equal layers once. Otherwise every layer is recorded."""
    return os.environ.get(REPEAT, "") != "0"


AHEAD = "VKBACKEND_AHEAD"


def records_ahead() -> bool:
    """Return whether an idle engine process records steps that are likely next."""
    return os.environ.get(AHEAD, "") != "0"


RUNTIME = "VKBACKEND_RUNTIME"


def runtime() -> str:
    return os.environ.get(RUNTIME, "") or "native"


KOMPUTE_ORDER = "VKBACKEND_KOMPUTE_ORDER"


def kompute_order() -> str:
    """Return how the kompute runtime orders dependent dispatches. "word" copies one word to the host between
    dispatches. "submit" puts dispatches in separate submissions. "" is the driver's default."""
    order = os.environ.get(KOMPUTE_ORDER, "")
    if order not in ("", "word", "submit"):
        raise InvalidArgument(f"{KOMPUTE_ORDER}={order!r}: there are word and submit")
    return order


def validation() -> bool:
    """Return whether to enable the Khronos validation layer with synchronization validation."""
    return os.environ.get("VKBACKEND_VALIDATION", "") not in ("", "0")


def timeout_s() -> int:
    """Return the seconds after which waiting for a device fails."""
    return min(max(1, _integer("VKBACKEND_TIMEOUT", 120)), 10**9)  # nanoseconds must fit 64 bits


def silence_s() -> int:
    """Return the seconds of silence after which a machine of a group is considered lost."""
    return max(2, _integer("VKBACKEND_SILENCE", 15))


COMPILE_THREADS = "VKBACKEND_COMPILE_THREADS"
MAX_COMPILE_THREADS = 8  # a driver's compiler uses up to 1 GB per thread, and threads share locks


def compile_threads() -> int:
    return max(1, _integer(COMPILE_THREADS, min(usable_cores(), MAX_COMPILE_THREADS)))


def poison() -> bool:
    """Return whether to fill new buffers with NaN, which exposes reads before writes."""
    return os.environ.get("VKBACKEND_POISON", "") not in ("", "0")


def faults() -> list[tuple[str, str, int, str]]:
    """Return (device, call, nth, result) of each fault in VKBACKEND_FAULT (faults.py)."""
    planned = []
    for item in filter(None, os.environ.get("VKBACKEND_FAULT", "").split(",")):
        device, call, nth, result = (item.split(":") + [""] * 4)[:4]
        if item.count(":") != 3 or not nth.isdecimal() or not re.fullmatch(r"hang|VK_[A-Z_]+", result):
            raise InvalidArgument(
                f"VKBACKEND_FAULT={item!r}: expected DEVICE:CALL:NTH:RESULT, such as "
                "Vulkan0:vkQueueSubmit:3:VK_ERROR_DEVICE_LOST"
            )
        planned.append((device, call, int(nth), result))
    return planned


def floor() -> bool:
    """Return whether to limit every device to `Limits.floor()`."""
    return os.environ.get("VKBACKEND_FLOOR", "") not in ("", "0")


def as_gpu() -> bool:
    """Return whether to treat a software device like a GPU when ops are chosen."""
    return os.environ.get("VKBACKEND_AS_GPU", "") not in ("", "0")


def exact() -> bool:
    """Return whether activations stay in F32, as with the flag --exact."""
    return os.environ.get("VKBACKEND_EXACT", "") not in ("", "0")


CACHE = "VKBACKEND_CACHE"


def caches() -> bool:
    return os.environ.get(CACHE) != "off"


def cache_dir() -> Path | None:
    """Return the cache folder, or None if caching is off or no home folder exists."""
    if not caches():
        return None
    path = os.environ.get(CACHE)
    return Path(path) if path else default_cache_dir()


def default_cache_dir() -> Path | None:
    base = user_cache()
    return None if base is None else base / "vkbackend"


def log(level: int, message: str) -> None:
    if debug() >= level:
        sys.stderr.write(f"vkbackend: {message}\n")
