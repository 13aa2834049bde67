"""Measured speeds (speed.py) from `speeds.json` of the cache folder. Delete the file to measure again.

Nothing here measures, so recording a step may use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vkbackend import cache_folder, env, ops
from vkbackend.recording import SLOW, Pace
from vkbackend.runtime import Device

ENTRY, FORMAT = "speeds.json", 1  # another format: measure again
DTYPE = "q8_0"  # of the weights that are read
# Submissions are cut for this part of the measured speed, which is of large matrices alone; attention, narrow
# matrices, throttling or a desktop are slower. Even at a quarter of it, a submission ends within a watchdog's
# 2 s.
TRUSTED = 1 / 4


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second of a device alone reading weights: from its own memory, from pinned host memory."""

    weights: float
    host: float


def known_speed(device: Device) -> Speed | None:
    known = numbers(f"speed {key_of(device)}")
    return Speed(*known) if len(known) == 2 else None


def pace_of(device: Device) -> Pace:
    """Submissions are cut by this: a part of the known speed, or what every GPU reaches."""
    known = known_speed(device)
    return Pace(TRUSTED * known.weights, TRUSTED * known.host) if known else SLOW


def key_of(device: Device) -> str:
    info = device.physical
    identity = f"{info.uuid} {info.driver} {info.driver_version} " if info else ""
    identity += type(device).__name__
    limited = env.disabled() | ({"floor"} if env.floor() else set()) | ({"as-gpu"} if env.as_gpu() else set())
    reads = {ops.operand_type(device.limits, 1, DTYPE)} - {"f32"}  # other ops under --exact
    return " ".join((identity, *sorted(limited | reads)))


def _read() -> dict[str, Any]:
    """Empty if missing, damaged or of another format."""
    content = cache_folder.read_json(ENTRY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}
    measured = content.get("measured")
    return measured if isinstance(measured, dict) else {}


def numbers(key: str) -> list[float]:
    """Only positive numbers; an empty list otherwise."""
    value = _read().get(key)
    known = value if isinstance(value, list) else []
    return known if all(isinstance(x, float) and 0 < x < math.inf for x in known) else []


def remember(key: str, value: list[float]) -> None:
    cache_folder.write_json(ENTRY, {"format": FORMAT, "measured": _read() | {key: value}})
