"""Counts the calls of Python and C functions that a piece of Python makes. Tests use the count in place of
the time, since it is the same on any machine, busy or not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each function is called within the block, by its name."""
    counts: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            counts[frame.f_code.co_name if event == "call" else function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(before)
