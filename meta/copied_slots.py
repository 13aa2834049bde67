"""Slots in device memory. Copies move the shares between devices through host pages.

Kernels write and read only device memory. After a segment, each device copies its share to its slot in the
pages. Then each reading device copies the other shares to its own memory. With a transfer queue, the device
meanwhile computes the other half of the step's rows (lag 2), and kernels never wait for the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import VkbackendError
from vkbackend.meta.imported_pages import ImportedPages
from vkbackend.meta.reduce import Reduce, ReduceSlots
from vkbackend.recording import Copy
from vkbackend.runtime import Device, RecordedCopies
from vkbackend.wire import wire_words


class CopiedSlots(ImportedPages):
    name, copies = "copies", True

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        super().__init__(devices, slot_nbytes)
        self._own: list[Buffer] = []  # each device's copy of all slots
        self._copies: dict[Reduce, tuple[list[RecordedCopies], list[RecordedCopies]]] = {}
        try:
            for device in devices:
                self._own.append(device.buffer(self.pages_nbytes, Home.SLOTS, "reduce slots"))
        except VkbackendError:
            self.close()
            raise

    def slot(self, device: int, reduce: Reduce) -> View:
        return self._in_own(device, super().slot(device, reduce))

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        of = super().readable(device, reduce)
        return ReduceSlots(
            self._own[device], of.offset, of.stride, of.count, of.own_index, of.writers, of.wire
        )

    def _in_own(self, device: int, view: View) -> View:
        return View(self._own[device], view.offset, view.shape, view.dtype)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        view = self._view(device, reduce, device)
        return self.pages.bytes[view.offset : view.end]

    def exchange(self, reduce: Reduce) -> None:
        if reduce not in self._copies:
            self._copies[reduce] = self._recorded(reduce)
        out, back = self._copies[reduce]
        for copies in out:
            copies.begin()
        for copies in out:
            copies.wait()
        for copies in back:
            copies.follow()

    def _recorded(self, reduce: Reduce) -> tuple[list[RecordedCopies], list[RecordedCopies]]:
        n_words = wire_words(reduce.wire, reduce.elements)

        def shares(device: int, writers: Sequence[int]) -> list[tuple[View, View]]:
            """Return, for each writer, the device's views of the writer's share: in the pages, and in the
            device's own memory."""
            views = [self._view(device, reduce, writer) for writer in writers]
            pages = [View(view.buffer, view.offset, (n_words,), "u32") for view in views]
            return [(view, self._in_own(device, view)) for view in pages]

        out, back = [], []
        for d, device in enumerate(self._devices):
            if d in reduce.writers:
                [(page, own)] = shares(d, [d])
                out.append(device.recorded_copies([Copy(own, page, "share")]))
            others = [writer for writer in reduce.writers if writer != d]
            if d in reduce.readers and others:
                copies = [Copy(page, own, "shares") for page, own in shares(d, others)]
                back.append(device.recorded_copies(copies))
        return out, back

    def release(self) -> None:
        for out, back in self._copies.values():
            for copies in (*out, *back):
                copies.close()
        self._copies.clear()

    def close(self) -> None:
        self.release()
        for device, buffer in zip(self._devices, self._own, strict=False):
            device.free(buffer)
        self._own = []
        super().close()
