"""Faults for certain letters of a case. The tests of the fuzzer search for them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from fuzz.kind import Wrong


class Planted:
    deadline_s = 0.5

    def __init__(self, folder: Path) -> None:
        self._cases = iter((b"a", b"xA", b"xC", b"b", b"xH", b"xW", b"yA", b"c"))

    def make(self, rng: random.Random) -> bytes:
        return next(self._cases)

    def check(self, case: bytes) -> str:
        if b"C" in case:
            os.kill(os.getpid(), signal.SIGSEGV)
        if b"H" in case:
            time.sleep(600)
        if b"W" in case:
            raise Wrong("accepted")
        if b"A" in case:
            raise ZeroDivisionError(case)
        return "refused"
