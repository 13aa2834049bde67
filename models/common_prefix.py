from __future__ import annotations

from collections.abc import Sequence

COMPARED = 256  # Slices are compared in C, this many tokens at a time.


def n_common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return how many leading tokens are equal, at most `most`."""
    most = min(most, len(a), len(b))
    for begin in range(0, most, COMPARED):
        end = min(begin + COMPARED, most)
        if a[begin:end] != b[begin:end]:
            return next(i for i in range(begin, end) if a[i] != b[i])
    return most
