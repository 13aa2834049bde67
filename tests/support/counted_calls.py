"""Counts calls of Python and C functions. Unlike a time, this count is the same on any machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            counts[frame.f_code.co_name if event == "call" else function.__name__] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # Calls of finalizers and of hypothesis' callback would count.
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
