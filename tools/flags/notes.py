"""Lines for stderr that come from flags; commands print them after the arguments are checked."""

from __future__ import annotations

import argparse
from collections.abc import Hashable


def note(namespace: argparse.Namespace, line: str, *, of: Hashable = None) -> None:
    """Queue a line, once for each `of` (default: the line)."""
    lines = dict(getattr(namespace, "noted", {}))
    lines.setdefault(of or line, line)
    namespace.noted, namespace.notes = lines, list(lines.values())
