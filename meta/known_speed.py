"""Read measured speeds (speed.py) from `speeds.json` in the cache folder.

Code that records a step may use this module, because the module never measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vkbackend import cache_folder, env, ops
from vkbackend.recording import SLOW, Pace
from vkbackend.runtime import Device

ENTRY, FORMAT = "speeds.json", 1
DTYPE = "q8_0"
# Submissions are sized as if the device ran at this fraction of its measured speed. Only large matrices are
# measured.
# Attention, narrow matrices, throttling or a desktop make steps slower. Even at a quarter of the speed, a
# submission ends within a watchdog's 2 s.
TRUSTED = 1 / 4


@dataclass(frozen=True, slots=True)
class Speed:
    """The bytes per second of reading weights from a device's memory and from pinned host memory, while other
    devices are idle."""

    weights: float
    host: float


def known_speed(device: Device) -> Speed | None:
    known = numbers(f"speed {key_of(device)}")
    return Speed(*known) if len(known) == 2 else None


BETTER = 1.05  # A kind of host memory replaces the default if a device reads it this many times as fast.


def known_host_kind(device: Device) -> str:
    """Return the kind of pinned host memory that the device reads fastest (host_memory.py), or "" for the
    default. A device that was not measured uses the default."""
    rates = {kind: known[0] for kind in device.host_kinds if (known := numbers(host_key(device, kind)))}
    default, best = (device.host_kinds or ("",))[0], max(rates, key=lambda kind: rates[kind], default="")
    return best if best and rates[best] > BETTER * rates.get(default, math.inf) else ""


def host_key(device: Device, kind: str) -> str:
    return f"host {kind} {key_of(device)}"


def reduce_key(devices: Sequence[Device], nbytes: int) -> str:
    return f"reduce {nbytes} {_names_of(devices)}"


def forget_reduces(devices: Sequence[Device]) -> None:
    """Forget how long reduces of all sizes take, because the devices will exchange in another way."""
    known, stale = _read(), ["reduce", _names_of(devices)]
    _write({key: value for key, value in known.items() if key.split(" ", 2)[::2] != stale})


def _names_of(devices: Sequence[Device]) -> str:
    return ", ".join(map(key_of, devices))


def pace_of(device: Device) -> Pace:
    """Return the speed for cutting submissions: a fraction of the known speed, or a speed that every GPU
    reaches."""
    known = known_speed(device)
    return Pace(TRUSTED * known.weights, TRUSTED * known.host) if known else SLOW


def key_of(device: Device) -> str:
    info = device.physical
    identity = f"{info.uuid} {info.driver} {info.driver_version} " if info else ""
    identity += type(device).__name__
    limited = env.disabled() | ({"floor"} if env.floor() else set()) | ({"as-gpu"} if env.as_gpu() else set())
    reads = {ops.operand_type(device.limits, 1, DTYPE)} - {"f32"}  # --exact uses other ops
    return " ".join((identity, *sorted(limited | reads)))


def _read() -> dict[str, Any]:
    content = cache_folder.read_json(ENTRY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}
    measured = content.get("measured")
    return measured if isinstance(measured, dict) else {}


def stored(key: str) -> Any:
    """Return the value stored for `key`, or None. Any program may have written the value."""
    return _read().get(key)


def numbers(key: str) -> list[float]:
    """Return the list stored for `key`, or an empty list unless all elements are positive numbers."""
    value = stored(key)
    known = value if isinstance(value, list) else []
    return known if all(isinstance(x, float) and 0 < x < math.inf for x in known) else []


def remember(key: str, value: Any) -> None:
    _write(_read() | {key: value})


def _write(measured: dict[str, Any]) -> None:
    cache_folder.write_json(ENTRY, {"format": FORMAT, "measured": measured})
