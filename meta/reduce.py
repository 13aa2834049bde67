"""An all-reduce, and the interface of its providers, which move and add the shares.

All providers sum in slot order, so they produce the same bits. Reduces alternate between two sets of slots
(parities). So a fast device can write reduce k + 1 while a slow device reads reduce k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from vkbackend.buffer import Buffer, View, Virtual, aligned
from vkbackend.wire import FORMATS, wire_block, wire_words

WIRES = ("auto", *FORMATS)
# `auto` sends a reduce as f16 from this number of elements on, by number of devices. For these sizes
# llama.cpp's NCCL path sends bfloat16. The error of f16 is an eighth of bfloat16's, but f16 needs 65 words
# instead of 64 (vkbackend/wire.py).
_F16_FROM = {1: 32_768, 2: 32_768, 3: 131_072}
_F16_FROM_MANY = 262_144
PART = 1024  # In large scattered reduces, a device's range is a multiple of this many elements.


def wire_of(wanted: str, elements: int, n_devices: int, software: bool = False) -> str:
    """Return the wire format, one of FORMATS, for `wanted` in WIRES. If all devices are software devices
    (`software`), `auto` is f32, which took 0.6 to 1.0 times as long as bf16 (lavapipe, bench-reduce of 2
    MB)."""
    if wanted != "auto":
        return wanted
    return "f16" if not software and elements >= _F16_FROM.get(n_devices, _F16_FROM_MANY) else "f32"


@dataclass(frozen=True, slots=True)
class Reduce:
    """An all-reduce. If `gather` is set, this is the second exchange of a scattered reduce, in which the host
    computes nothing. `lane` is the half (0 or 1) of every slot that the reduce uses. The halves of a step use
    different lanes, so they do not wait for each other."""

    parity: int
    elements: int
    writers: tuple[int, ...]
    wire: str = "f32"
    gather: bool = False
    lane: int = 0
    readers: tuple[int, ...] = ()
    # If this reduce is a piece of a sum, the elements of the whole sum, otherwise 0.
    of: int = 0

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the whole sum in f32."""
        return 4 * (self.of or self.elements)


def parts_of(reduce: Reduce, n: int) -> list[tuple[int, int]]:
    """Divide the elements among n devices or nodes, in complete blocks of the wire format. Return (begin,
    end) of each."""
    unit = PART if reduce.elements >= PART * n else wire_block(reduce.wire)
    size = aligned(-(-reduce.elements // n), unit)
    return [(min(d * size, reduce.elements), min((d + 1) * size, reduce.elements)) for d in range(n)]


@dataclass(frozen=True, slots=True)
class ReduceSlots:
    """A device's slots to sum, `stride` words apart. `own_index` is the slot of the device's own share.
    Bit s of `writers` is set if slot s is used."""

    buffer: Buffer | Virtual
    offset: int  # bytes
    stride: int
    count: int
    own_index: int | None
    writers: int
    wire: str = "f32"

    @classmethod
    def of_sum(cls, buffer: Buffer | Virtual, offset: int, elements: int) -> ReduceSlots:
        return cls(buffer, offset, stride=elements, count=1, own_index=None, writers=1)

    def view(self, elements: int, first: int = 0) -> View:
        """Return elements first..first+elements of every slot. `first` must be the start of a block of the
        wire format."""
        words = (self.count - 1) * self.stride + wire_words(self.wire, elements)
        dtype = "f32" if self.wire == "f32" else "u32"
        return View(self.buffer, self.offset + 4 * wire_words(self.wire, first), (words,), dtype)


class Provider(ABC):
    name: str
    pages_nbytes: int = 0  # Bytes of shared host memory.
    copies: bool = False  # Whether copies follow segments.
    host_writes: bool = False  # Whether devices read only sums that the host wrote, and no device's shares.
    network_s: float = 0.0  # Total seconds of exchanges between nodes.

    def of(self, reduce: Reduce) -> Provider:
        """Return the provider that moves and adds this reduce."""
        return self

    @abstractmethod
    def slot(self, device: int, reduce: Reduce) -> View:
        """Return the slot of `device` as u32 words. The slot begins with the device's share."""

    @abstractmethod
    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        """Return the slots that `device` sums after the exchange."""

    def scatters(self, reduce: Reduce) -> bool:
        """Return whether each device sums a range of the elements, and a second exchange gathers the
        ranges."""
        return False

    def pieces(self, reduce: Reduce) -> int:
        """Return the number of reduces, each of some rows, into which a sum is divided. Devices write the
        shares of one reduce while they read the shares of another."""
        return 1

    def hops(self, reduce: Reduce) -> int:
        """Return in how many exchanges devices pass shares on (0: every device reads all slots at once)."""
        return 0

    def passed(self, device: int, reduce: Reduce, hop: int) -> list[tuple[View, View]]:
        """Return (source, target) of the device's copies before exchange `hop`, or after the last one. Each
        exchange uses the other set of slots."""
        return []

    def gathered(self, device: int, reduce: Reduce) -> View:
        """Return the memory for the gathered sum, f32."""
        raise NotImplementedError(f"{self.name} does not scatter")

    @abstractmethod
    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        """Return the uint8 bytes of `slot`, or of `gathered` in a gather."""

    @abstractmethod
    def exchange(self, reduce: Reduce) -> None:
        """Do the host's work after a reduce's last write and before its first read."""

    def release(self) -> None:  # noqa: B027 - most providers record nothing
        """Release what was recorded, before the devices close."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory. No step may be running."""


def slot_size(nbytes: int) -> int:
    return 2 * aligned(-(-nbytes // 2))
