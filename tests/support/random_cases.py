"""The number of random cases that hypothesis tries."""

from __future__ import annotations

DEFAULT = 100
with_all = False  # conftest.py sets this before it loads the test files.


def examples(n: int = DEFAULT) -> int:
    """Return `n` with --all, and a quarter of `n` otherwise. Seeds differ between runs, so several runs cover
    more cases."""
    return n if with_all else max(1, n // 4)
