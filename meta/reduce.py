"""All-reduce providers: where partial sums meet. Two of one interface, chosen by what the devices can do.

`ImportedPages` is the fast one: host pages that all devices share, so the host moves no bytes. `HostSum`
works anywhere: each device has staging of its own and the host adds. Both sum in slot order, so both give the
same bits. Slot sets are double buffered by parity: a device may write reduce k + 1 while a slower one still
reads k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, UnsupportedFeature
from vkbackend.memory import HostPages, aligned
from vkbackend.meta.tensor import Reduce
from vkbackend.runtime import Device


class Provider(ABC):
    """Slots for partial sums of up to `slot_nbytes` bytes."""

    name: str

    @abstractmethod
    def slot(self, device: int, parity: int) -> View:
        """Where `device` writes its partial."""

    @abstractmethod
    def readable(self, device: int, reduce: Reduce) -> tuple[View, int | None, int]:
        """What `device` sums: (slots f32 [n_slots, words], index of its own share or None, bit mask of slots
        in use)."""

    @abstractmethod
    def exchange(self, reduce: Reduce) -> None:
        """The host's part between writing and reading; every device has finished the segment."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; nothing may be running."""


class ImportedPages(Provider):
    """One slot per device and parity in pinned host pages that every device has imported."""

    name = "pages"

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        self._devices, self._slot = devices, aligned(slot_nbytes)
        limit = min(device.limits.max_storage_range for device in devices)
        if len(devices) * self._slot > limit:  # the kernel that sums binds all slots of a parity
            raise UnsupportedFeature(
                f"{len(devices)} slots of {self._slot} bytes exceed one binding of {limit}; "
                f"use the provider {HostSum.name} or a smaller micro-batch"
            )
        align = max(device.limits.host_import_align for device in devices)
        self.pages = HostPages(2 * len(devices) * self._slot, align)
        self._buffers: list[Buffer] = []
        try:
            for device in devices:
                self._buffers.append(device.import_pages(self.pages, "reduce slots"))
        except (UnsupportedFeature, OutOfDeviceMemory):
            self.close()
            raise

    def slot(self, device: int, parity: int) -> View:
        offset = (parity * len(self._devices) + device) * self._slot
        return View(self._buffers[device], offset, (self._slot // 4,))

    def readable(self, device: int, reduce: Reduce) -> tuple[View, int | None, int]:
        n = len(self._devices)
        slots = View(self._buffers[device], reduce.parity * n * self._slot, (n, self._slot // 4))
        own = device if device in reduce.writers else None
        return slots, own, sum(1 << w for w in reduce.writers)

    def exchange(self, reduce: Reduce) -> None:
        pass  # the devices read each other's slots themselves

    def close(self) -> None:
        for device, buffer in zip(self._devices, self._buffers, strict=False):
            device.free(buffer)
        self._buffers = []


class HostSum(Provider):
    """Per device a slot it writes and a sum it reads, per parity, in staging of its own; the host adds in
    slot order."""

    name = "host-sum"

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        self._devices, self._slot = devices, aligned(slot_nbytes)
        self._buffers = [device.buffer(4 * self._slot, Home.STAGING, "reduce staging") for device in devices]

    def slot(self, device: int, parity: int) -> View:
        return View(self._buffers[device], parity * self._slot, (self._slot // 4,))

    def readable(self, device: int, reduce: Reduce) -> tuple[View, int | None, int]:
        return View(self._buffers[device], (2 + reduce.parity) * self._slot, (1, self._slot // 4)), None, 1

    def exchange(self, reduce: Reduce) -> None:
        def words(device: int, at: int) -> np.ndarray:
            host = self._buffers[device].host
            return np.asarray(
                host[at * self._slot : (at + 1) * self._slot].view(np.float32)[: reduce.elements]
            )

        for d in reduce.writers:
            self._devices[d].invalidate(self._buffers[d])
        first, *others = reduce.writers
        total = words(0, 2 + reduce.parity)
        np.copyto(total, words(first, reduce.parity))
        for d in others:
            np.add(total, words(d, reduce.parity), out=total)
        for d, device in enumerate(self._devices):
            if d:
                np.copyto(words(d, 2 + reduce.parity), total)
            device.flush(self._buffers[d])

    def close(self) -> None:
        for device, buffer in zip(self._devices, self._buffers, strict=True):
            device.free(buffer)
        self._buffers = []


PROVIDERS = {cls.name: cls for cls in (ImportedPages, HostSum)}


def make_provider(devices: Sequence[Device], slot_nbytes: int, wanted: str | None = None) -> Provider:
    """`wanted` (a name in PROVIDERS), or imported pages where every device takes them, else the host sum."""
    if wanted is not None:
        if wanted not in PROVIDERS:
            raise InvalidArgument(
                f"all-reduce provider {wanted!r} is unknown; there are: {', '.join(PROVIDERS)}"
            )
        return PROVIDERS[wanted](devices, slot_nbytes)
    try:
        return ImportedPages(devices, slot_nbytes)
    except (UnsupportedFeature, OutOfDeviceMemory) as error:
        env.log(1, f"all-reduce through per-device staging and a host sum: {error}")
        return HostSum(devices, slot_nbytes)
