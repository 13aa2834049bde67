"""Helpers of scripts that alternate runs of several variants, so other load slows all variants."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vkbackend.errors import VkbackendError
from vkbackend.tools.console import printable


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """After a typed error or OSError, exit with one line and code 1."""
    try:
        yield
    except (VkbackendError, OSError) as error:
        sys.exit(f"error: {printable(str(error))}")


def least_and_median(values: Sequence[float]) -> tuple[float, float]:
    """Return minimum and median. Other load affects the minimum less than the median."""
    return min(values), statistics.median(values)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = [f"\n{title}\n", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
