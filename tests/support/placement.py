"""Checks a plan of scratch memory independently of memory.plan_scratch."""

from __future__ import annotations

from vkbackend.buffer import Virtual
from vkbackend.memory import lifetimes
from vkbackend.recording import Recording


def check_placement(recording: Recording, offsets: dict[Virtual, int]) -> list[str]:
    """Return a message for each pair of values that share bytes while both values are needed."""
    lives = list(lifetimes(recording).items())
    clashes = []
    for i, (a, (a_first, a_last)) in enumerate(lives):
        for b, (b_first, b_last) in lives[i + 1 :]:
            alive_together = a_first <= b_last and b_first <= a_last
            if alive_together and offsets[a] < offsets[b] + b.nbytes and offsets[b] < offsets[a] + a.nbytes:
                clashes.append(f"{a!r} and {b!r} share bytes while both live")
    return clashes
