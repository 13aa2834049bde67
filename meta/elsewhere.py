"""A stand-in for another node's device. It has the device's limits, but memory only for slots and logits.

Every node plans and records for all devices, and runs its own devices. Between steps, node 0 can access the
memory of other nodes through a `link`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vkbackend.buffer import Buffer, Home, View, aligned
from vkbackend.errors import UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.meta.exchange_times import ExchangeTime
from vkbackend.recording import Copy, Recording
from vkbackend.runtime import Queue
from vkbackend.twins.device import HostDevice, HostExecutable


@dataclass(frozen=True, slots=True)
class HeapCard:
    nbytes: int
    device_local: bool
    budget: int


@dataclass(frozen=True, slots=True)
class PhysicalCard:
    name: str
    uuid: str
    vendor: str
    driver: str
    driver_version: str
    is_cpu: bool
    heaps: tuple[HeapCard, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A node's description of its device. `speed` holds the rates at which the device reads its memory and
    host memory, in bytes per second."""

    name: str
    limits: Limits
    imports_pages: bool
    has_codebooks: bool
    free: int | None
    physical: PhysicalCard | None
    speed: tuple[float, float] | None = None


class Link(Protocol):
    """A connection to a device's node. It addresses caches and tables by name."""

    def write(self, device: int, name: str, offset: int, data: np.ndarray) -> None: ...

    def read(self, device: int, name: str, offset: int, nbytes: int) -> np.ndarray: ...

    def read_many(self, device: int, ranges: Sequence[tuple[str, int, int]]) -> list[np.ndarray]:
        """`ranges` lists (name, offset, number of bytes)."""

    def copy(self, device: int, copies: list[tuple[str, int, int, int]]) -> None:
        """Copy bytes within caches. `copies` lists (name, source offset, target offset, number of bytes)."""


class _Idle(Queue):
    ahead = True

    def submit(self, executable: Any, first: int, count: int) -> None:
        self.submitted += count

    def completed(self) -> int:
        return self.submitted

    def allow(self, number: int) -> None:
        pass

    def wait(self, number: int, timeout_s: float) -> bool:
        return True


class Elsewhere(HostDevice):
    """A stand-in for device number `index`. `exchange` is the measured time of an exchange with its node."""

    def __init__(self, index: int, node: str, card: Card, exchange: ExchangeTime | None = None) -> None:
        super().__init__(f"{node}/{card.name}", card.limits)
        self.index, self.node, self.card, self.exchange = index, node, card, exchange
        self.imports_pages, self.has_codebooks = card.imports_pages, card.has_codebooks
        self.host_free: int | None = None
        self.queue: Queue = _Idle()
        self.link: Link | None = None

    @property
    def physical(self) -> Any:
        return self.card.physical

    def free_nbytes(self) -> int | None:
        return self.card.free

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        if home is Home.STAGING:  # transfers write slots and logits to this memory
            return super().buffer(nbytes, home, label)
        self.counts["buffer"] += 1
        self.nbytes[home] += aligned(nbytes)
        return Buffer(aligned(nbytes), home, label)

    def write(self, view: View, data: np.ndarray) -> None:
        if self.link:
            self.link.write(self.index, _name(view), view.offset, data)

    def read(self, view: View) -> np.ndarray:
        return self._linked().read(self.index, _name(view), view.offset, view.nbytes)

    def read_many(self, views: Sequence[View]) -> list[np.ndarray]:
        ranges = [(_name(view), view.offset, view.nbytes) for view in views]
        return self._linked().read_many(self.index, ranges) if ranges else []

    def _linked(self) -> Link:
        if self.link is None:
            raise UnsupportedFeature(f"{self.name} belongs to another node; only node 0 can read its bytes")
        return self.link

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """The device's own node makes the copies."""

    def build(self, recording: Recording, *, events: bool = False) -> HostExecutable:
        return HostExecutable(recording)

    def run(self, recording: Recording) -> None:
        copies = [c for c in recording.commands if isinstance(c, Copy)]
        assert len(copies) == len(recording.commands) and all(c.src.buffer is c.dst.buffer for c in copies)
        if self.link:
            ranges = [(_name(c.src), c.src.offset, c.dst.offset, c.src.nbytes) for c in copies]
            self.link.copy(self.index, ranges)


def _name(view: View) -> str:
    return view.buffer.label
