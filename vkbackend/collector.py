"""Pauses Python's cyclic garbage collector while large object graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the collector in a block or a decorated function. Recordings have many objects and no cycles.
    Scanning these objects doubled the time to build a recording (512 rows of Qwen3-235B on two cards: 3.0 s
    instead of 1.5 s).

    The collector is global. If two threads pause it, it resumes when the thread that paused first is done.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
