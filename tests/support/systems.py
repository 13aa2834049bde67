"""Differences between operating systems that matter to tests."""

from __future__ import annotations

import os
import sys
import tomllib
from functools import cache
from pathlib import Path

from places import ROOT

WINDOWS = sys.platform == "win32"
IS_ROOT = not WINDOWS and os.geteuid() == 0


def link(source: Path, target: Path) -> None:
    """Make a symbolic link, or on Windows, where this needs a privilege, a hard link."""
    if WINDOWS:
        os.link(source, target)
    else:
        target.symlink_to(source)


@cache
def linux_only() -> dict[str, str]:
    """Return the names of tests that cannot run on Windows, each with the reason."""
    reasons = tomllib.loads((ROOT / "tests" / "linux_only.toml").read_text(encoding="utf-8"))
    return {name: reason for reason, names in reasons.items() for name in names}


def not_on_windows(name: str) -> str | None:
    """Return why a test cannot run on Windows. `name` is a node id; a name without parameters means all."""
    names = linux_only()
    file = name.partition("::")[0]
    reason = names.get(name) or names.get(name.partition("[")[0]) or names.get(file)
    return reason and f"not on Windows: {reason}"
