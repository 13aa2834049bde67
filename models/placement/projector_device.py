"""Chooses the device of a projector among the devices of its model."""

from __future__ import annotations

from collections.abc import Sequence

ABOUT = 0.9  # Two speeds, or two amounts of free memory, are about equal if their ratio is at least this.


def fastest_with_room(speeds: Sequence[float], left: Sequence[int]) -> int:
    """Return the index of the fastest device that has room. Among devices of about the same speed, return the
    one with the most memory left, or the first if that is about equal, too. If no device has room, return the
    device with the smallest shortage.

    `left` are the bytes that the model and the projector leave free on each device, negative if they do not
    fit.
    """
    room = [d for d, nbytes in enumerate(left) if nbytes >= 0]
    if not room:
        return max(range(len(left)), key=lambda d: left[d])
    fastest = max(speeds[d] for d in room)
    quick = [d for d in room if speeds[d] >= ABOUT * fastest]
    most = max(left[d] for d in quick)
    return next(d for d in quick if left[d] >= ABOUT * most)
