"""Options for exchanging partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from vkbackend.checks import choice, number_of, whole_number
from vkbackend.errors import UnsupportedFeature
from vkbackend.meta.known_ways import MAX_AHEAD, ONE_CALL, Ahead, known_choice
from vkbackend.meta.reduce import WIRES
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS, planned_ways
from vkbackend.options_class import check_fields, option
from vkbackend.runtime import SIGNALS, Device

# A submission takes the host about 10 us. If two segments are submitted ahead, devices need not wait. If all
# were submitted ahead, the host's part of an exchange would wait.
AHEAD = 2


def ahead_depth(name: str, value: Any) -> Ahead | Literal["auto"]:
    """Return how many segments to submit ahead. None or "all" means the complete step."""
    if value is None or (isinstance(value, str) and value == "all"):
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, str) and value == ONE_CALL:
        return ONE_CALL
    number = number_of(value) if isinstance(value, str) else value
    return whole_number(name, number, 0, MAX_AHEAD, f", all for the whole step, {ONE_CALL}, or auto")


class ReduceKeywords(TypedDict, total=False):
    reduce_type: str
    """The format in which partial sums are sent: "f32", "bf16" (8 bits of significand), "f16" (11 bits, in
    blocks of 128 with one exponent per block), or "auto" (default): f16 for large sums, but f32 if all
    devices run on the processor."""
    reduce_provider: str
    """How partial sums are added: "pages" (in host pages that all devices import), "scatter" (the same, but
    each device sums a part for all), "pieces" (pages, with large sums in pieces), "host-sum" (by the host),
    "visible" (by the host, which writes the sums to device memory), "copies" (pages, which copies fill and
    read), "ring" or "tree" (devices pass shares on), or "auto" (default): for each size as `vkbackend tune`
    measured, or else by the features of the devices."""
    submit_ahead: int | Literal["all", "one-call", "auto"] | None
    """How many segments of a step are submitted to a device before it may run them. None or "all": all
    segments. "one-call": all segments in one call of the driver, if the host writes the sums (providers
    "host-sum" and "visible"). "auto" (default): as `vkbackend tune` measured, or else 2."""
    reduce_signal: str
    """How host and devices signal each other that a sum is complete: "semaphore", "flag" (the host polls a
    word of its memory), "event" (devices wait in their command buffers, if the host writes the sums),
    "flag+event", or "auto" (default): as `vkbackend tune` measured, or else "semaphore"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceOptions:
    """`ReduceKeywords` describes the fields. Raises InvalidArgument."""

    reduce_type: str = option("auto", choice(WIRES))
    reduce_provider: str = option("auto", choice(("auto", *PROVIDERS)))
    submit_ahead: int | Literal["one-call", "auto"] | None = option("auto", ahead_depth)
    reduce_signal: str = option("auto", choice(("auto", *SIGNALS)))

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        """Raise UnsupportedFeature if the devices, whose largest sum has `slot_nbytes`, cannot follow a given
        option."""
        signal, one_call = self.reduce_signal, f"submit_ahead {ONE_CALL}"
        here = [device for device in devices if not device.node]
        if signal != "auto" and here and not any(signal in device.queue.signals for device in here):
            names = ", ".join(device.name for device in here)
            raise UnsupportedFeature(f"no device of {names} signals by {signal}; use semaphore")
        if "event" in signal:
            self._check_sums(f"reduce_signal {signal}", devices, slot_nbytes)
        if self.submit_ahead != ONE_CALL:
            return
        self._check_sums(one_call, devices, slot_nbytes)
        if "event" in signal:
            raise UnsupportedFeature(
                f"with {one_call}, a segment cannot wait for an event, because Vulkan allows events to be "
                f"set only before the call; use reduce_signal {' or '.join(SIGNALS[:2])}"
            )
        if lacking := [device.name for device in devices if not device.queue.ahead or device.node]:
            raise UnsupportedFeature(
                f"{', '.join(lacking)}: {one_call} needs timeline semaphores and one machine; use "
                "submit_ahead auto"
            )

    def _check_sums(self, wanted: str, devices: Sequence[Device], slot_nbytes: int) -> None:
        ways = planned_ways(self.reduce_provider, devices, slot_nbytes)
        others = [way.name for _, way in ways if not way.host_writes]
        if others and slot_nbytes and len(devices) > 1:
            named = f"auto ({', '.join(others)})" if self.reduce_provider == "auto" else others[0]
            raise UnsupportedFeature(
                f"{wanted} needs sums that the host writes: use reduce_provider {' or '.join(HOST_WRITTEN)}, "
                f"not {named}, with which devices read what other devices write"
            )

    def relaying(self, devices: Sequence[Device]) -> tuple[Ahead, str]:
        """Return how many segments to submit ahead, and the signal. ONE_CALL allows no events, so an option
        that requires one of both replaces a measured choice of the other."""
        known = known_choice(devices) if "auto" in (self.submit_ahead, self.reduce_signal) else None
        ahead = (known.ahead if known else AHEAD) if self.submit_ahead == "auto" else self.submit_ahead
        signal = (
            (known.signal if known else SIGNALS[0]) if self.reduce_signal == "auto" else self.reduce_signal
        )
        if ahead == ONE_CALL and "event" in signal:
            if self.submit_ahead == "auto":
                ahead = AHEAD
            elif self.reduce_signal == "auto":
                signal = SIGNALS[0]
        return ahead, signal
