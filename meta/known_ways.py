"""Read and store how some devices exchange sums fastest, as `vkbackend tune` measured (measured_ways.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from vkbackend.meta.known_speed import forget_reduces, key_of, remember, stored
from vkbackend.runtime import SIGNALS, Device

MAX_AHEAD = 1 << 16  # no step has this many segments
ONE_CALL: Final = "one-call"
# How many segments are submitted to a device before it may run them. None: all segments of the step.
# ONE_CALL: all, and in one call of the driver.
Ahead = int | Literal["one-call"] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """`ways` lists (largest bytes of a sum, provider) in order of size. A step signals by `signal`, and
    submits `ahead` segments before they may run."""

    ways: tuple[tuple[int, str], ...]
    signal: str
    ahead: Ahead

    def way(self, nbytes: int) -> str:
        return next((name for most, name in self.ways if nbytes <= most), self.ways[-1][1])


def known_choice(devices: Sequence[Device]) -> Choice | None:
    """Return the choice for these devices in this order, or None if none was measured."""
    if len(devices) < 2 or any(device.node for device in devices):
        return None
    value = stored(_key(devices))
    return _choice(value) if isinstance(value, Mapping) else None


def chosen_ways(devices: Sequence[Device]) -> tuple[tuple[int, str], ...]:
    choice = known_choice(devices)
    return choice.ways if choice else ()


def remember_choice(devices: Sequence[Device], choice: Choice | None) -> None:
    forget_reduces(devices)
    value: Any = []
    if choice:
        value = {"ways": [list(way) for way in choice.ways], "signal": choice.signal, "ahead": choice.ahead}
    remember(_key(devices), value)


def _key(devices: Sequence[Device]) -> str:
    return f"exchange {', '.join(map(key_of, devices))}"


def _choice(value: Mapping[str, Any]) -> Choice | None:
    """Return the choice that a file stores, or None if it is invalid, because anybody may have edited the
    file."""
    ways, signal, ahead = value.get("ways"), value.get("signal"), value.get("ahead")
    if not isinstance(ways, list) or not ways or signal not in SIGNALS:
        return None
    pairs = [
        (pair[0], pair[1]) for pair in ways if isinstance(pair, list) and [*map(type, pair)] == [int, str]
    ]
    in_order = len(pairs) == len(ways) and all(a < b for (a, _), (b, _) in pairwise(pairs))
    is_depth = ahead is None or (type(ahead) is int and 0 <= ahead <= MAX_AHEAD)
    is_depth |= ahead == ONE_CALL and "event" not in str(signal)
    return Choice(tuple(pairs), str(signal), ahead) if in_order and is_depth else None
