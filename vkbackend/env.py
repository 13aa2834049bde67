"""The package's environment variables, all read here (docs/env_vars.md).

`DEBUG` levels: 1 devices, plan and fallbacks; 2 time of each dispatch; 3 barriers and submissions; 4 shader
variants built; 5 intermediate values.
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
    """DEBUG level; 0 when unset."""
    return _integer("DEBUG", 0)


# Optional features, named as in vulkan/capabilities.py, which probes all of them.
FEATURES = frozenset(
    "buffer_address cooperative_matrix cooperative_matrix_nv denorm_float16 device_map "
    "executable_info float16 full_subgroups host_import int8 int8_units_fast int_dot int_dot_accelerated "
    "memory_budget memory_model memory_model_device robust_buffer_access rte_float16 storage16 "
    "storage8 subgroup_arithmetic subgroup_max subgroup_min subgroup_shuffle subgroup_size_control "
    "timeline".split()
)


def disabled() -> frozenset[str]:
    """VKBACKEND_DISABLE=timeline,host_import,...: features not to use. Raises InvalidArgument for a name not
    in FEATURES, with either runtime."""
    names = frozenset(filter(None, map(str.strip, os.environ.get("VKBACKEND_DISABLE", "").split(","))))
    if unknown := names - FEATURES:
        raise InvalidArgument(
            f"VKBACKEND_DISABLE names no feature: {', '.join(sorted(unknown))}; "
            f"there are: {', '.join(sorted(FEATURES))}"
        )
    return names


def without_gpu() -> bool:
    """Whether RADV_FORCE_FAMILY is set, Mesa's variable to run AMD's compiler without an AMD GPU. RADV of
    Mesa 25.0 then crashes on queries of the memory budget (GFX1201, GFX1151, NAVI33)."""
    return bool(os.environ.get("RADV_FORCE_FAMILY"))


FUSE = "VKBACKEND_FUSE"


def fusing() -> bool:
    """VKBACKEND_FUSE=0: one dispatch per op, which keeps all intermediate values."""
    return os.environ.get(FUSE, "") != "0"


RUNTIME = "VKBACKEND_RUNTIME"


def runtime() -> str:
    """VKBACKEND_RUNTIME=kompute: the default runtime (native if unset)."""
    return os.environ.get(RUNTIME, "") or "native"


KOMPUTE_ORDER = "VKBACKEND_KOMPUTE_ORDER"


def kompute_order() -> str:
    """VKBACKEND_KOMPUTE_ORDER orders dependent dispatches: "word" (synced words), "submit" (submissions) or
    "" (the driver's default)."""
    order = os.environ.get(KOMPUTE_ORDER, "")
    if order not in ("", "word", "submit"):
        raise InvalidArgument(f"{KOMPUTE_ORDER}={order!r}: there are word and submit")
    return order


def validation() -> bool:
    """VKBACKEND_VALIDATION=1: use the Khronos validation layer with synchronization validation."""
    return os.environ.get("VKBACKEND_VALIDATION", "") not in ("", "0")


def timeout_s() -> int:
    """VKBACKEND_TIMEOUT: seconds without progress until a wait on a device fails (default 120)."""
    return min(max(1, _integer("VKBACKEND_TIMEOUT", 120)), 10**9)  # nanoseconds must fit 64 bits


def silence_s() -> int:
    """VKBACKEND_SILENCE: seconds of silence until a host of a group counts as lost (default 15)."""
    return max(2, _integer("VKBACKEND_SILENCE", 15))


COMPILE_THREADS = "VKBACKEND_COMPILE_THREADS"
MAX_COMPILE_THREADS = 8  # driver compilers take up to a GB each and share locks


def compile_threads() -> int:
    """VKBACKEND_COMPILE_THREADS: threads that compile pipelines (default: the cores, at most 8)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, _integer(COMPILE_THREADS, min(cores, MAX_COMPILE_THREADS)))


def poison() -> bool:
    """VKBACKEND_POISON=1: fill new buffers with NaN to expose reads before writes."""
    return os.environ.get("VKBACKEND_POISON", "") not in ("", "0")


def faults() -> list[tuple[str, str, int, str]]:
    """VKBACKEND_FAULT=DEVICE:CALL:NTH:RESULT,...: Vulkan calls that fail (faults.py)."""
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
    """VKBACKEND_FLOOR=1: limit every device to the portable floor."""
    return os.environ.get("VKBACKEND_FLOOR", "") not in ("", "0")


def as_gpu() -> bool:
    """VKBACKEND_AS_GPU=1: choose ops for software devices as for GPUs."""
    return os.environ.get("VKBACKEND_AS_GPU", "") not in ("", "0")


def exact() -> bool:
    """VKBACKEND_EXACT=1: as --exact, activations in F32 only."""
    return os.environ.get("VKBACKEND_EXACT", "") not in ("", "0")


CACHE = "VKBACKEND_CACHE"


def caches() -> bool:
    """VKBACKEND_CACHE=off disables the cache folder."""
    return os.environ.get(CACHE) != "off"


def cache_dir() -> Path | None:
    """VKBACKEND_CACHE or `default_cache_dir`; None if off or without a home (cache_folder.py)."""
    if not caches():
        return None
    path = os.environ.get(CACHE)
    return Path(path) if path else default_cache_dir()


def default_cache_dir() -> Path | None:
    """$XDG_CACHE_HOME/vkbackend or ~/.cache/vkbackend; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "vkbackend"
    except RuntimeError:
        return None


def log(level: int, message: str) -> None:
    if debug() >= level:
        sys.stderr.write(f"vkbackend: {message}\n")
