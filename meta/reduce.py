"""All-reduce providers, chosen by the devices' features. All providers sum in slot order, so they produce the
same bits.

In `pages`, slots are in host pages that all devices import. `scatter` is like `pages`, but first each device
sums a part for all devices. Reduces alternate between two sets of slots (parities). So a fast device can
write reduce k + 1 while a slow device reads reduce k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, Home, View, Virtual, aligned
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.pages import HostPages
from vkbackend.runtime import Device
from vkbackend.twins.arrays import take_f16
from vkbackend.wire import FORMATS, wire_block, wire_words

WIRES = ("auto", *FORMATS)
# Smallest reduces that `auto` sends as f16, in elements, by number of devices. For these sizes llama.cpp's
# NCCL path sends bfloat16. The error of f16 is an eighth of bfloat16's, but f16 needs 65 words instead of 64
# (vkbackend/wire.py).
_F16_FROM = {1: 32_768, 2: 32_768, 3: 131_072}
_F16_FROM_MANY = 262_144
# A reduce is scattered from these numbers of devices and bytes on, because reading n - 1 complete slots then
# takes longer than a second exchange.
SCATTER_DEVICES, SCATTER_NBYTES = 4, 1 << 20
PART = 1024  # In large scattered reduces, parts are multiples of this many elements.


def wire_of(wanted: str, elements: int, n_devices: int, software: bool = False) -> str:
    """Return the wire format, one of FORMATS, for `wanted` in WIRES. If all devices run on the processor
    (`software`), `auto` is f32, which took 0.6 to 1.0 times as long as bf16 (lavapipe, bench-reduce of 2
    MB)."""
    if wanted != "auto":
        return wanted
    return "f16" if not software and elements >= _F16_FROM.get(n_devices, _F16_FROM_MANY) else "f32"


@dataclass(frozen=True, slots=True)
class Reduce:
    """An all-reduce. `gather` marks the second exchange of a scattered reduce, in which the host computes
    nothing. `lane` is the half (0 or 1) of every slot that the reduce uses. The halves of a step use
    different lanes, so they do not wait for each other."""

    parity: int
    elements: int
    writers: tuple[int, ...]
    wire: str = "f32"
    gather: bool = False
    lane: int = 0
    readers: tuple[int, ...] = ()


def parts_of(reduce: Reduce, n: int) -> list[tuple[int, int]]:
    """Return the elements begin..end that each of n devices or nodes sums, in complete blocks of the wire
    format."""
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
        """Return elements first..first+elements of every slot. A block of the wire format must begin at
        `first`."""
        words = (self.count - 1) * self.stride + wire_words(self.wire, elements)
        dtype = "f32" if self.wire == "f32" else "u32"
        return View(self.buffer, self.offset + 4 * wire_words(self.wire, first), (words,), dtype)


class Provider(ABC):
    name: str
    pages_nbytes: int = 0  # Bytes of shared host memory.
    network_s: float = 0.0  # Total seconds of exchanges between nodes.

    @abstractmethod
    def slot(self, device: int, reduce: Reduce) -> View:
        """Return `device`'s share and the rest of its slot, as u32 words."""

    @abstractmethod
    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        """Return the slots that `device` sums after the exchange."""

    def scatters(self, reduce: Reduce) -> bool:
        """Return whether each device sums a part, and a second exchange gathers the parts."""
        return False

    def gathered(self, device: int, reduce: Reduce) -> View:
        """Return the f32 memory for the gathered parts."""
        raise NotImplementedError(f"{self.name} does not scatter")

    @abstractmethod
    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        """Return the uint8 bytes of `slot`, or of `gathered` in a gather."""

    @abstractmethod
    def exchange(self, reduce: Reduce) -> None:
        """Do the host's work between a reduce's last write and its first read."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory. No step may be running."""


class ImportedPages(Provider):
    """A provider with slots in host pages that all devices import. Even and odd reduces have separate slots,
    one per device and one for gathering."""

    name = "pages"

    def __init__(self, devices: Sequence[Device], slot_nbytes: int, scatter_from: int | None = None) -> None:
        self._devices, self._slot, self._scatter_from = devices, _slot_size(slot_nbytes), scatter_from
        limit = min(device.limits.max_storage_range for device in devices)
        if len(devices) * self._slot > limit:  # the summing kernel binds all slots of a parity
            raise UnsupportedFeature(
                f"{len(devices)} slots of {self._slot} bytes exceed one binding of {limit}; "
                f"use the provider {HostSum.name} or a smaller micro-batch"
            )
        self._per_parity = (len(devices) + (scatter_from is not None)) * self._slot
        self.pages = HostPages(2 * self._per_parity, _page(devices))
        self.pages_nbytes = self.pages.nbytes
        if scatter_from is not None:
            self.name = f"scatter from {scatter_from} bytes"
        self._buffers: list[Buffer] = []
        try:
            for device in devices:
                self._buffers.append(device.import_pages(self.pages, "reduce slots"))
        except (UnsupportedFeature, OutOfDeviceMemory):
            self.close()
            raise

    def slot(self, device: int, reduce: Reduce) -> View:
        return self._view(device, reduce, device)

    def _view(self, device: int, reduce: Reduce, index: int) -> View:
        lane = reduce.lane * self._slot // 2
        offset = reduce.parity * self._per_parity + index * self._slot + lane
        return View(self._buffers[device], offset, ((self._slot - lane) // 4,), "u32")

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        buffer, stride, n = self._buffers[device], self._slot // 4, len(self._devices)
        if reduce.gather:
            return ReduceSlots.of_sum(buffer, self.gathered(device, reduce).offset, stride)
        own_index = device if device in reduce.writers else None
        mask = sum(1 << w for w in reduce.writers)
        return ReduceSlots(
            buffer, self._view(device, reduce, 0).offset, stride, n, own_index, mask, reduce.wire
        )

    def scatters(self, reduce: Reduce) -> bool:
        all_read = len(reduce.readers) == len(self._devices)
        return all_read and self._scatter_from is not None and 4 * reduce.elements >= self._scatter_from

    def gathered(self, device: int, reduce: Reduce) -> View:
        return replace(self._view(device, reduce, len(self._devices)), dtype="f32")

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        view = self.gathered(device, reduce) if reduce.gather else self.slot(device, reduce)
        return self.pages.bytes[view.offset : view.end]

    def exchange(self, reduce: Reduce) -> None:
        pass  # the devices read all slots

    def close(self) -> None:
        for device, buffer in zip(self._devices, self._buffers, strict=False):
            device.free(buffer)
        self._buffers = []


class HostSum(Provider):
    """A provider whose host adds slots in order, in f32."""

    name = "host-sum"

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        self._devices, self._slot = devices, _slot_size(slot_nbytes)
        self._buffers = [device.buffer(4 * self._slot, Home.STAGING, "reduce staging") for device in devices]
        self._wide = np.empty(self._slot // 4, np.uint32)

    def slot(self, device: int, reduce: Reduce) -> View:
        lane = reduce.lane * self._slot // 2
        offset = reduce.parity * self._slot + lane
        return View(self._buffers[device], offset, ((self._slot - lane) // 4,), "u32")

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        offset = (2 + reduce.parity) * self._slot + reduce.lane * self._slot // 2
        return ReduceSlots.of_sum(self._buffers[device], offset, self._slot // 4)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        view = self.slot(device, reduce)
        return np.asarray(self._buffers[device].host)[view.offset : view.end]

    def _host(self, device: int, at: int, dtype: type, n: int, lane: int) -> np.ndarray:
        """Return n values of a lane in a device's region `at`. Regions 0 and 1 hold shares, and regions 2 and
        3 hold sums."""
        host, lane = np.asarray(self._buffers[device].host), lane * self._slot // 2
        return host[at * self._slot + lane : (at + 1) * self._slot].view(dtype)[:n]

    def _share(self, device: int, reduce: Reduce, begin: int, end: int) -> np.ndarray:
        """Return elements begin..end of a share as f32."""
        if reduce.wire == "f32":
            return self._host(device, reduce.parity, np.float32, end, reduce.lane)[begin:]
        wide = self._wide[: end - begin]
        if reduce.wire == "bf16":
            halves = self._host(device, reduce.parity, np.uint16, end, reduce.lane)[begin:]
            np.left_shift(halves, 16, out=wide, dtype=np.uint32)
            return wide.view(np.float32)
        words = self._host(device, reduce.parity, np.uint32, wire_words("f16", end), reduce.lane)
        take_f16(words[wire_words("f16", begin) :], wide.view(np.float32))
        return wide.view(np.float32)

    def exchange(self, reduce: Reduce) -> None:
        self.add(reduce, 0, reduce.elements)
        self.spread(reduce)

    def total(self, reduce: Reduce) -> np.ndarray:
        """Return the f32 sum [elements], in memory of this node's first reading device, or else of device
        0."""
        d = reduce.readers[0] if reduce.readers else 0
        return self._host(d, 2 + reduce.parity, np.float32, reduce.elements, reduce.lane)

    def add(self, reduce: Reduce, begin: int, end: int) -> None:
        """Sum elements begin..end. A block of the wire format must begin at `begin`."""
        for d in reduce.writers:
            self._devices[d].invalidate(self._buffers[d])
        first, *others = reduce.writers
        total = self.total(reduce)[begin:end]
        np.copyto(total, self._share(first, reduce, begin, end))
        for d in others:
            np.add(total, self._share(d, reduce, begin, end), out=total)

    def spread(self, reduce: Reduce) -> None:
        total = self.total(reduce)
        for d in reduce.readers:
            if d != reduce.readers[0]:
                self._host(d, 2 + reduce.parity, np.float32, reduce.elements, reduce.lane)[:] = total
            self._devices[d].flush(self._buffers[d])

    def close(self) -> None:
        for device, buffer in zip(self._devices, self._buffers, strict=True):
            device.free(buffer)
        self._buffers = []


def _slot_size(nbytes: int) -> int:
    return 2 * aligned(-(-nbytes // 2))


PROVIDERS = ("pages", "scatter", "host-sum")


def slots_nbytes(wanted: str, devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
    """Return (bytes, padded bytes) of staging memory per device. Shared pages count for the first device."""
    n_devices = len(devices)
    if n_devices == 1 or not slot_nbytes:
        return [(0, 0)] * n_devices
    slot = _slot_size(slot_nbytes)
    fits = all(d.imports_pages and n_devices * slot <= d.limits.max_storage_range for d in devices)
    if wanted == "host-sum" or (wanted == "auto" and not fits):
        return [(4 * slot, 4 * slot)] * n_devices
    gathers = _scatter_from(wanted, devices, slot_nbytes) is not None
    nbytes = 2 * (n_devices + gathers) * slot
    return [(nbytes, aligned(nbytes, _page(devices)))] + [(0, 0)] * (n_devices - 1)


def _scatter_from(wanted: str, devices: Sequence[Device], slot_nbytes: int) -> int | None:
    """Return the minimum bytes of a scattered reduce through pages, or None for never. Between nodes,
    scattering is faster for three devices or more, because a device sends 4/3 of a slot instead of two."""
    if wanted == "scatter":
        return 0
    least = SCATTER_DEVICES - any(device.node for device in devices)
    many = len(devices) >= least and slot_nbytes >= SCATTER_NBYTES
    return SCATTER_NBYTES if wanted == "auto" and many else None


def _page(devices: Sequence[Device]) -> int:
    return max(device.limits.host_import_align for device in devices)


def make_provider(devices: Sequence[Device], slot_nbytes: int, wanted: str = "auto") -> Provider:
    """Create the provider `wanted`, one of PROVIDERS. `auto` chooses imported pages if all devices support
    them, otherwise the host sum. Raises UnsupportedFeature."""
    if wanted == "host-sum":
        return HostSum(devices, slot_nbytes)
    try:
        return ImportedPages(devices, slot_nbytes, _scatter_from(wanted, devices, slot_nbytes))
    except (UnsupportedFeature, OutOfDeviceMemory) as error:
        if wanted != "auto":
            raise
        env.log(1, f"all-reduce through per-device staging and a host sum: {error}")
        return HostSum(devices, slot_nbytes)
