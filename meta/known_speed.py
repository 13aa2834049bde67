"""What was measured of devices before (`speed.py` measures): `speeds.json` of the cache folder.

Deleting the file measures again. Nothing here measures, so recording a step may ask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vkbackend import cache_folder, env, ops
from vkbackend.recording import SLOW, Pace
from vkbackend.runtime import Device

ENTRY, FORMAT = "speeds.json", 1  # in the cache folder; if its format is another, measure again
DTYPE = "q8_0"  # of the weights that are read
# Submissions are cut as if the device had this part of its measured speed. The measurement is the best case:
# large matrices and nothing else. Attention, narrow matrices, or a card that throttles or draws a desktop are
# slower. Even if a device reaches only a quarter of this part, a submission ends within a watchdog's 2 s.
TRUSTED = 1 / 4


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second at which a device alone reads weights in its memory, and in pinned host memory."""

    weights: float
    host: float


def known_speed(device: Device) -> Speed | None:
    """The speed of a device, if it was measured before."""
    known = numbers(f"speed {key_of(device)}")
    return Speed(*known) if len(known) == 2 else None


def pace_of(device: Device) -> Pace:
    """What submissions to a device are cut by: a part of its known speed, or what every GPU has."""
    known = known_speed(device)
    return Pace(TRUSTED * known.weights, TRUSTED * known.host) if known else SLOW


def key_of(device: Device) -> str:
    info = device.physical
    what = f"{info.uuid} {info.driver} {info.driver_version} " if info else ""
    what += type(device).__name__
    limited = env.disabled() | ({"floor"} if env.floor() else set()) | ({"as-gpu"} if env.as_gpu() else set())
    reads = {ops.operand_type(device.limits, 1, DTYPE)} - {"f32"}  # other ops under --exact
    return " ".join((what, *sorted(limited | reads)))


def _read() -> dict[str, Any]:
    """What has been measured; nothing where that is missing, damaged or of another format."""
    found = cache_folder.read_json(ENTRY)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}
    measured = found.get("measured")
    return measured if isinstance(measured, dict) else {}


def numbers(key: str) -> list[float]:
    """What is known of `key`: positive numbers, or nothing."""
    found = _read().get(key)
    known = found if isinstance(found, list) else []
    return known if all(isinstance(x, float) and 0 < x < math.inf for x in known) else []


def remember(key: str, value: list[float]) -> None:
    cache_folder.write_json(ENTRY, {"format": FORMAT, "measured": _read() | {key: value}})
