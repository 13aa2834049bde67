"""Finds drivers on which one way to signal is slow, and names the ways that `tune` would keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from vkbackend.meta.known_ways import ONE_CALL, Ahead
from vkbackend.meta.measured_ways import TOKEN_NBYTES, Measured, choice_of
from vkbackend.meta.options import AHEAD, ahead_depth
from vkbackend.meta.ways import HOST_WRITTEN
from vkbackend.runtime import SIGNALS
from vkbackend.tools.report.part import Row

# A wait for a semaphore takes 118 us on gfx906 (field reports), and about 10 us on other cards.
SLOW_WAIT_US = 50.0
SLOWER = 1.25  # A way that takes more than this many times as long as another one is a quirk.


def quirks(rows: Sequence[Row]) -> Iterator[str]:
    """`rows` are the exchanges of a group of devices (reduces.py)."""
    devices = rows[0]["device"]
    wrong = [row for row in rows if row["sums"] != "exact"]
    for way in dict.fromkeys((r["provider"], r["signal"]) for r in wrong if r["ahead"] != ONE_CALL):
        yield f"{devices}: sums by {' and '.join(way)} are WRONG. Please report this with the driver's name."
    for provider in dict.fromkeys(r["provider"] for r in wrong if r["ahead"] == ONE_CALL):
        yield (
            f"{devices}: sums by {provider} are WRONG if one call submits a step. Do not use "
            f"`--submit-ahead {ONE_CALL}` with it."
        )
    us = {
        (row["provider"], row["signal"], row["ahead"]): float(row["us"])
        for row in rows
        if (row["bytes"], row["sums"]) == (TOKEN_NBYTES, "exact")
    }
    semaphore, depth = SIGNALS[0], str(AHEAD)
    usual, flag = (us.get(("pages", signal, depth)) for signal in SIGNALS[:2])
    if usual and flag and usual - flag > SLOW_WAIT_US and usual > SLOWER * flag:
        yield (
            f"{devices}: waiting for semaphores takes {usual - flag:.0f} us longer than reading a flag. "
            "`--reduce-signal flag` avoids these waits."
        )
    for provider in HOST_WRITTEN:
        plain, event = (us.get((provider, signal, depth)) for signal in (semaphore, "event"))
        if plain and event and event > SLOWER * plain:
            yield (
                f"{devices}: waiting for an event takes {event / plain:.1f} times as long as for a "
                f"semaphore ({provider}), because the wait occupies a device or a core."
            )
    none, every = (us.get(("pages", semaphore, ahead)) for ahead in ("0", "all"))
    if none and every and every > SLOWER * none:
        yield (
            f"{devices}: with all segments submitted ahead, an exchange takes {every / none:.1f} times as "
            "long as with none. The driver handles waiting submissions badly; use `--submit-ahead 0`."
        )


def kept(rows: Sequence[Row]) -> str:
    """Return a sentence about the ways that `tune` would keep for these devices, or "". `tune` keeps events
    and ONE_CALL only after more steps than the report runs."""
    measured = [
        Measured(
            *(row["bytes"], row["provider"], row["signal"], _depth(row["ahead"])),
            *(float(row["us"]), row["sums"] == "exact"),
        )
        for row in rows
    ]
    choice = choice_of(measured)
    if not choice:
        return ""
    first, *others = choice.ways
    ways = [first[1]] + [
        f"{after[1]} above {before[0]} bytes" for before, after in pairwise([first, *others])
    ]
    ahead = "all" if choice.ahead is None else choice.ahead
    return (
        f"Ways that `tune` would keep for {rows[0]['device']}: {', '.join(ways)}; signal {choice.signal}, "
        f"{ahead} ahead."
    )


def _depth(text: str) -> Ahead:
    depth = ahead_depth("ahead", text)
    return None if depth == "auto" else depth
