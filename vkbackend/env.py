"""Every environment variable the package reads, in one place (documented in docs/env_vars.md).

`DEBUG` is a ladder: 1 devices, plan and fallbacks; 2 one line per dispatch with time; 3 barriers and
submissions; 4 shader variants built; 5 intermediate values by name.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from vkbackend.errors import InvalidArgument


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidArgument(
            f"{name}={text!r} is not a whole number; unset it or set e.g. {name}={default}"
        ) from None


def debug() -> int:
    """The level of the DEBUG ladder, 0 when unset."""
    return _integer("DEBUG", 0)


# Optional features by the names of capabilities.py, which probes every one of them on every device.
FEATURES = frozenset(
    "buffer_address cooperative_matrix cooperative_matrix_nv denorm_float16 device_map "
    "executable_info float16 full_subgroups host_import int8 int8_units_fast int_dot int_dot_accelerated "
    "memory_budget memory_model memory_model_device robust_buffer_access rte_float16 storage16 "
    "storage8 subgroup_arithmetic subgroup_max subgroup_min subgroup_shuffle subgroup_size_control "
    "timeline".split()
)


def disabled() -> frozenset[str]:
    """VKBACKEND_DISABLE=timeline,host_import,...: optional features to leave unused even where a device has
    them. Raises InvalidArgument for a name that is not in FEATURES, with either runtime."""
    names = frozenset(filter(None, map(str.strip, os.environ.get("VKBACKEND_DISABLE", "").split(","))))
    if unknown := names - FEATURES:
        raise InvalidArgument(
            f"VKBACKEND_DISABLE names no feature: {', '.join(sorted(unknown))}; "
            f"there are: {', '.join(sorted(FEATURES))}"
        )
    return names


def without_gpu() -> bool:
    """Whether RADV_FORCE_FAMILY is set: Mesa's variable to run AMD's compiler without an AMD GPU. RADV of
    Mesa 25.0 crashes when it is asked for the memory budget of such a GPU (GFX1201, GFX1151, NAVI33), so
    nobody asks then."""
    return bool(os.environ.get("RADV_FORCE_FAMILY"))


FUSE = "VKBACKEND_FUSE"


def fusing() -> bool:
    """VKBACKEND_FUSE=0: a dispatch for every op that a model calls, with all values in between."""
    return os.environ.get(FUSE, "") != "0"


RUNTIME = "VKBACKEND_RUNTIME"


def runtime() -> str:
    """VKBACKEND_RUNTIME=kompute: the runtime to use where none is named (default native)."""
    return os.environ.get(RUNTIME, "") or "native"


KOMPUTE_ORDER = "VKBACKEND_KOMPUTE_ORDER"


def kompute_order() -> str:
    """VKBACKEND_KOMPUTE_ORDER: how dependent dispatches are ordered, "word" (by synced words), "submit" (by
    submissions) or "" (as the driver allows)."""
    order = os.environ.get(KOMPUTE_ORDER, "")
    if order not in ("", "word", "submit"):
        raise InvalidArgument(f"{KOMPUTE_ORDER}={order!r}: there are word and submit")
    return order


def validation() -> bool:
    """VKBACKEND_VALIDATION=1: run under the Khronos validation layer with synchronization validation."""
    return os.environ.get("VKBACKEND_VALIDATION", "") not in ("", "0")


def timeout_s() -> int:
    """VKBACKEND_TIMEOUT: seconds without progress after which a wait on a device is given up (default
    120)."""
    return min(max(1, _integer("VKBACKEND_TIMEOUT", 120)), 10**9)  # in nanoseconds it must fit 64 bits


def silence_s() -> int:
    """VKBACKEND_SILENCE: a host of a group counts as lost after so many seconds of silence (default 15)."""
    return max(2, _integer("VKBACKEND_SILENCE", 15))


COMPILE_THREADS = "VKBACKEND_COMPILE_THREADS"
MAX_COMPILE_THREADS = 8  # compilers of drivers take up to a GB each, and share locks


def compile_threads() -> int:
    """VKBACKEND_COMPILE_THREADS: threads that compile pipelines side by side (default: the cores, 8 at
    most)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, _integer(COMPILE_THREADS, min(cores, MAX_COMPILE_THREADS)))


def poison() -> bool:
    """VKBACKEND_POISON=1: fill every new buffer with NaN bit patterns, so that a read before a write
    shows."""
    return os.environ.get("VKBACKEND_POISON", "") not in ("", "0")


def faults() -> list[tuple[str, str, int, str]]:
    """VKBACKEND_FAULT=DEVICE:CALL:NTH:RESULT,...: Vulkan calls to let fail (see vkbackend/faults.py)."""
    found = []
    for item in filter(None, os.environ.get("VKBACKEND_FAULT", "").split(",")):
        device, call, nth, result = (item.split(":") + [""] * 4)[:4]
        if item.count(":") != 3 or not nth.isdecimal() or not re.fullmatch(r"hang|VK_[A-Z_]+", result):
            raise InvalidArgument(
                f"VKBACKEND_FAULT={item!r}: expected DEVICE:CALL:NTH:RESULT, such as "
                "Vulkan0:vkQueueSubmit:3:VK_ERROR_DEVICE_LOST"
            )
        found.append((device, call, int(nth), result))
    return found


def floor() -> bool:
    """VKBACKEND_FLOOR=1: treat every device as if it had only the portable floor's limits."""
    return os.environ.get("VKBACKEND_FLOOR", "") not in ("", "0")


def as_gpu() -> bool:
    """VKBACKEND_AS_GPU=1: let ops choose for a software device what they choose for a GPU."""
    return os.environ.get("VKBACKEND_AS_GPU", "") not in ("", "0")


def exact() -> bool:
    """VKBACKEND_EXACT=1: run models as if --exact were given: with F32 activations alone."""
    return os.environ.get("VKBACKEND_EXACT", "") not in ("", "0")


CACHE = "VKBACKEND_CACHE"


def caches() -> bool:
    """VKBACKEND_CACHE=off: nothing is kept from one start to the next."""
    return os.environ.get(CACHE) != "off"


def cache_dir() -> Path | None:
    """VKBACKEND_CACHE, else `default_cache_dir`; None: off, or there is no home (see cache_folder.py)."""
    if not caches():
        return None
    path = os.environ.get(CACHE)
    return Path(path) if path else default_cache_dir()


def default_cache_dir() -> Path | None:
    """$XDG_CACHE_HOME/vkbackend, else ~/.cache/vkbackend; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "vkbackend"
    except RuntimeError:
        return None


def log(level: int, message: str) -> None:
    """Write `message` to stderr if DEBUG is at least `level`."""
    if debug() >= level:
        sys.stderr.write(f"vkbackend: {message}\n")
