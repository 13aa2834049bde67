"""A kind of fuzz case. A case consists of bytes, which can be stored and made smaller."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol


class Wrong(Exception):
    """The code accepted an invalid case, or its result is wrong."""


class Kind(Protocol):
    """`make` returns a random case. `check` lets the code handle a case and returns how it ended, such as
    "accepted" or "refused". `check` raises Wrong, or an exception that the code must not raise."""

    deadline_s: float

    def __init__(self, folder: Path) -> None: ...

    def make(self, rng: random.Random) -> bytes: ...

    def check(self, case: bytes) -> str: ...
