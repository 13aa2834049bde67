"""Python's collector of cyclic garbage, which looks through everything again while it is being built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection meanwhile, also as a decorator. Recordings are many objects without cycles: to look
    through them took as long as to make them (512 rows of Qwen3-235B on two cards: 3.0 s, without it 1.5 s).

    The collector is the process's. Where two threads pause it, it is back when the one that paused it first
    has ended.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
