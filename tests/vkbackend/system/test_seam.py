"""Only code in vkbackend/system checks which operating system runs."""

from __future__ import annotations

import re

import pytest
from places import ROOT

pytestmark = pytest.mark.no_vulkan
ASKS = re.compile(
    r"\bsys\.platform\b|\bos\.name\b|\bplatform\.system\(\)|\bhasattr\((os|signal|socket|mmap), "
)
NAMED = {"tools/report/machine.py"}  # this command prints the name of the system


def test_only_the_seam_asks_for_the_system() -> None:
    asks = {
        path.relative_to(ROOT).as_posix()
        for layer in ("vkbackend", "meta", "models", "tools")
        for path in (ROOT / layer).rglob("*.py")
        if path.parent.name != "system" and ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert asks == NAMED
