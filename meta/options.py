"""Options for exchanging partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from vkbackend.checks import choice, number_of, whole_number
from vkbackend.meta.reduce import PROVIDERS, WIRES
from vkbackend.options_class import check_fields, option
from vkbackend.runtime import SIGNALS

MAX_AHEAD = 1 << 16  # no step has this many segments
# A submission takes the host about 10 us. With two segments ahead, devices need not wait. Submitting all
# segments ahead would delay the host's part of an exchange.
AHEAD: int | None = 2


def ahead_depth(name: str, value: Any) -> int | None:
    """Return how many segments to submit ahead. None or "all" means the complete step."""
    if value is None or (isinstance(value, str) and value == "all"):
        return None
    number = number_of(value) if isinstance(value, str) else value
    return whole_number(name, number, 0, MAX_AHEAD, ", or all for the whole step")


class ReduceKeywords(TypedDict, total=False):
    reduce_type: str
    """The format in which partial sums are sent: "f32", "bf16" (8 bits of significand), "f16" (11 bits, in
    blocks of 128 with one exponent per block), or "auto" (default): f16 for large sums, but f32 if all
    devices run on the processor."""
    reduce_provider: str
    """How partial sums are added: "pages" (in host pages that all devices import), "scatter" (the same, but
    each device sums a part for all), "host-sum" (by the host), or "auto" (default): chosen by the features of
    the devices and the size of the sums."""
    submit_ahead: int | Literal["all"] | None
    """How many segments of a step are submitted to a device before it may run them (default: 2). None or
    "all": all segments."""
    reduce_signal: str
    """How host and devices signal each other that a sum is complete: "semaphore" (default), "flag" (the host
    polls a word of its memory), "event" (devices wait in their command buffers), or "flag+event"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceOptions:
    """`ReduceKeywords` describes the fields. Raises InvalidArgument."""

    reduce_type: str = option("auto", choice(WIRES))
    reduce_provider: str = option("auto", choice(("auto", *PROVIDERS)))
    submit_ahead: int | None = option(AHEAD, ahead_depth)
    reduce_signal: str = option(SIGNALS[0], choice(SIGNALS))

    def __post_init__(self) -> None:
        check_fields(self)
