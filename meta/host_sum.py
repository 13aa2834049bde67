"""Providers whose host adds the shares, in slot order and in f32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import VkbackendError
from vkbackend.meta.reduce import Provider, Reduce, ReduceSlots, slot_size
from vkbackend.runtime import Device
from vkbackend.twins.arrays import take_f16
from vkbackend.wire import wire_words


class HostSum(Provider):
    """A provider whose sums are in staging memory, from which the devices read them."""

    name = "host-sum"
    host_writes = True

    _n_regions = 4  # regions of a device's staging memory: shares and sums, each for two parities

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        self._devices, self._slot, n = devices, slot_size(slot_nbytes), self._n_regions
        self._buffers = [device.buffer(n * self._slot, Home.STAGING, "reduce staging") for device in devices]
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
        """Sum elements begin..end. `begin` must be the start of a block of the wire format."""
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


class VisibleSum(HostSum):
    """A provider whose host writes the sums to device memory (through a resizable BAR), so the devices do not
    read them over the bus. The host adds in its own memory, because it reads device memory slowly."""

    name = "visible"
    _n_regions = 2

    def __init__(self, devices: Sequence[Device], slot_nbytes: int) -> None:
        super().__init__(devices, slot_nbytes)
        self._total = np.empty((2, self._slot), np.uint8)
        self._sums: list[Buffer] = []
        try:
            for device in devices:
                self._sums.append(device.buffer(2 * self._slot, Home.VISIBLE, "reduce sums"))
        except VkbackendError:
            self.close()
            raise

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        offset = reduce.parity * self._slot + reduce.lane * self._slot // 2
        return ReduceSlots.of_sum(self._sums[device], offset, self._slot // 4)

    def total(self, reduce: Reduce) -> np.ndarray:
        lane = reduce.lane * self._slot // 2
        return self._total[reduce.parity, lane:].view(np.float32)[: reduce.elements]

    def spread(self, reduce: Reduce) -> None:
        total = self.total(reduce).view(np.uint8)
        for d in reduce.readers:
            begin = self.readable(d, reduce).offset
            np.asarray(self._sums[d].host)[begin : begin + total.nbytes] = total
            self._devices[d].flush(self._sums[d])

    def close(self) -> None:
        super().close()
        for device, buffer in zip(self._devices, self._sums, strict=False):
            device.free(buffer)
        self._sums = []
