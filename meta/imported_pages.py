"""Slots in host pages that all devices import.

With `pages`, every device reads all slots. With `scatter`, each device first sums a range of the elements for
all devices. With `pieces`, a sum is divided into pieces. While devices read one piece, they write the next,
so both directions of the bus are busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vkbackend.buffer import Buffer, View
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.meta.reduce import Provider, Reduce, ReduceSlots, slot_size
from vkbackend.pages import HostPages
from vkbackend.runtime import Device

PIECE_NBYTES, MAX_PIECES = 1 << 20, 8  # Moving a piece takes longer than an exchange.


def page_of(devices: Sequence[Device]) -> int:
    return max(device.limits.host_import_align for device in devices)


class ImportedPages(Provider):
    """A provider with slots in host pages that all devices import. Even and odd reduces have separate slots.
    Each has `shares` slots per device and one for gathering. If `cut`, sums of several rows are reduced in
    pieces."""

    name = "pages"

    def __init__(
        self,
        devices: Sequence[Device],
        slot_nbytes: int,
        scatter_from: int | None = None,
        cut: bool = False,
        shares: int = 1,
    ) -> None:
        self._devices, self._slot, self._scatter_from = devices, slot_size(slot_nbytes), scatter_from
        self._cut, self._shares = cut, shares
        limit = min(device.limits.max_storage_range for device in devices)
        if len(devices) * self._slot > limit:  # the summing kernel binds all slots of a parity
            raise UnsupportedFeature(
                f"{len(devices)} slots of {self._slot} bytes exceed one binding of {limit}; "
                "use the provider host-sum or a smaller micro-batch"
            )
        self._per_parity = (len(devices) * shares + (scatter_from is not None)) * self._slot
        self.pages = HostPages(2 * self._per_parity, page_of(devices))
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

    def _view(self, device: int, reduce: Reduce, owner: int, index: int = 0, hop: int = 0) -> View:
        lane, parity = reduce.lane * self._slot // 2, (reduce.parity + hop) % 2
        offset = parity * self._per_parity + (owner * self._shares + index) * self._slot + lane
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

    def pieces(self, reduce: Reduce) -> int:
        return min(max(2, reduce.nbytes // PIECE_NBYTES), MAX_PIECES) if self._cut else 1

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
