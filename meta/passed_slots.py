"""Slots in device memory that devices fill by passing shares on through host pages, in a ring or by doubling.

In the ring, every device reads the newest share of its neighbour, in n - 1 exchanges. By doubling, a device
reads all shares that another device has, so their number doubles, in log2 n exchanges (Bruck et al. 1997, the
concatenation algorithm, which needs no power of two). The shares are added at the end, in the order of the
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import VkbackendError
from vkbackend.meta.imported_pages import ImportedPages
from vkbackend.meta.reduce import Reduce, ReduceSlots
from vkbackend.runtime import Device
from vkbackend.wire import wire_words


@dataclass(frozen=True, slots=True)
class Hop:
    """Device d reads shares p + first to p + first + count - 1 of device p = d + distance (modulo n)."""

    distance: int
    first: int
    count: int

    def shares(self, device: int, n: int) -> list[int]:
        """Return the shares that `device` lets another device read."""
        return [(device + self.first + i) % n for i in range(self.count)]


def ring(n: int) -> list[Hop]:
    return [Hop(1, at, 1) for at in range(n - 1)]


def doubling(n: int) -> list[Hop]:
    numbers = [1 << i for i in range((n - 1).bit_length())]
    return [Hop(at, 0, min(at, n - at)) for at in numbers]


HOPS: dict[str, Callable[[int], list[Hop]]] = {"ring": ring, "tree": doubling}


def pages_of(name: str, n: int) -> int:
    """Return how many shares a device lets another device read at once."""
    return max((hop.count for hop in HOPS[name](n)), default=1)


class PassedSlots(ImportedPages):
    """`name` is a key of HOPS. Each device has `pages_of` slots in the pages, for the shares that it passes
    on, and a slot for every share in its own memory."""

    def __init__(self, name: str, devices: Sequence[Device], slot_nbytes: int) -> None:
        self._hops = HOPS[name](len(devices))
        super().__init__(devices, slot_nbytes, shares=pages_of(name, len(devices)))
        self.name = name
        self._own: list[Buffer] = []
        try:
            for device in devices:
                nbytes = len(devices) * self._slot
                self._own.append(device.buffer(nbytes, Home.SLOTS, "reduce slots"))
        except VkbackendError:
            self.close()
            raise

    def slot(self, device: int, reduce: Reduce) -> View:
        return self._share(device, reduce, device)

    def _share(self, device: int, reduce: Reduce, share: int) -> View:
        lane = reduce.lane * self._slot // 2
        return View(self._own[device], share * self._slot + lane, ((self._slot - lane) // 4,), "u32")

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        of, first = super().readable(device, reduce), self._share(device, reduce, 0)
        return ReduceSlots(first.buffer, first.offset, of.stride, of.count, of.own_index, of.writers, of.wire)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        view = self._view(device, reduce, device)
        return self.pages.bytes[view.offset : view.end]

    def _is_passed(self, reduce: Reduce) -> bool:
        """Return whether all devices write and read. Otherwise every device reads all shares at once."""
        n = len(self._devices)
        return len(reduce.writers) == len(reduce.readers) == n

    def hops(self, reduce: Reduce) -> int:
        return len(self._hops) if self._is_passed(reduce) else 1

    def passed(self, device: int, reduce: Reduce, hop: int) -> list[tuple[View, View]]:
        n, n_words = len(self._devices), wire_words(reduce.wire, reduce.elements)
        moves: list[tuple[View, View]] = []

        def own(share: int) -> View:
            view = self._share(device, reduce, share)
            return View(view.buffer, view.offset, (n_words,), "u32")

        def page(of: int, index: int, hop: int) -> View:
            view = self._view(device, reduce, of, index, hop)
            return View(view.buffer, view.offset, (n_words,), "u32")

        if not self._is_passed(reduce):
            if hop == 0:
                return [(own(device), page(device, 0, 0))] if device in reduce.writers else []
            others = [writer for writer in reduce.writers if writer != device]
            return [(page(w, 0, 0), own(w)) for w in others] if device in reduce.readers else []
        if hop:
            last = self._hops[hop - 1]
            peer = (device + last.distance) % n
            shares = last.shares(peer, n)
            moves += [(page(peer, i, hop - 1), own(share)) for i, share in enumerate(shares)]
        if hop < len(self._hops):
            shares = self._hops[hop].shares(device, n)
            moves += [(own(share), page(device, i, hop)) for i, share in enumerate(shares)]
        return moves

    def close(self) -> None:
        for device, buffer in zip(self._devices, self._own, strict=False):
            device.free(buffer)
        self._own = []
        super().close()
