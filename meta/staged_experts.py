"""Pinned memory through which experts move from the model file to their slots (expert_moves.py), because
devices cannot read the mapped file. While steps run, a thread copies experts from the file to pinned memory,
which has room for N_STAGED experts on each device. From there, the device copies them to the slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

from vkbackend.buffer import Buffer, Home
from vkbackend.host_copy import copy_into
from vkbackend.meta.expert_slots import slot_nbytes
from vkbackend.meta.slices import Load
from vkbackend.meta.streamed_weights import Source, expert_bytes
from vkbackend.meta.tensor import SlotTable
from vkbackend.runtime import Device

N_STAGED = 8  # An expert of gpt-oss-120b has 13 MB.


def streamed_stacks(
    layers: Mapping[str, Sequence[Load]], tables: Mapping[str, SlotTable]
) -> dict[str, Sequence[Load]]:
    """Return the stacks of the layers that have slots and stay in the file."""
    return {prefix: layers[prefix] for prefix in tables if layers[prefix][0].home is Home.STREAM}


def staged_nbytes(streamed: Mapping[str, Sequence[Load]], d: int) -> int:
    return N_STAGED * _expert_nbytes(streamed, d)


def _expert_nbytes(streamed: Mapping[str, Sequence[Load]], d: int) -> int:
    """Return the number of bytes of the largest expert, with all its matrices."""
    return max((sum(slot_nbytes(load, d) for load in stacks) for stacks in streamed.values()), default=0)


class StagedExperts:
    """Copies up to N_STAGED experts at a time. An expert is (layer's prefix, number)."""

    def __init__(
        self, devices: Sequence[Device], streamed: Mapping[str, Sequence[Load]], source: Source
    ) -> None:
        """The arrays of `source` keep the file mapped. Raises OutOfDeviceMemory."""
        self._devices, self._streamed = devices, streamed
        self._data = {load.name: source.data(load.name) for stacks in streamed.values() for load in stacks}
        self._strides = [_expert_nbytes(streamed, d) for d in range(len(devices))]
        self._buffers = [
            device.buffer(staged_nbytes(streamed, d), Home.STREAM, "staged experts") if stride else None
            for d, (device, stride) in enumerate(zip(devices, self._strides, strict=True))
        ]
        self._here = [d for d, device in enumerate(devices) if self._buffers[d] and not device.node]
        self._thread = ThreadPoolExecutor(1, "vkbackend-experts")
        self._copying: Future[None] | None = None

    def has(self, prefix: str) -> bool:
        return prefix in self._streamed

    def begin(self, experts: Sequence[tuple[str, int]]) -> None:
        """Start to copy. The devices must have read the previous experts."""
        assert self._copying is None and len(experts) <= N_STAGED
        self._copying = self._thread.submit(self._copy, experts)

    def _copy(self, experts: Sequence[tuple[str, int]]) -> None:
        for k, (prefix, expert) in enumerate(experts):
            for d in self._here:
                places = self.places(d, k, prefix)
                for load, (buffer, at) in zip(self._streamed[prefix], places, strict=True):
                    data = expert_bytes(load, d, expert, self._data[load.name])
                    if data.size:
                        copy_into(buffer.host[at : at + data.size].reshape(data.shape), data)

    def places(self, d: int, k: int, prefix: str) -> list[tuple[Buffer, int]]:
        """Return (buffer, first byte) of each matrix of the k-th expert. Device `d` must have a share."""
        buffer = self._buffers[d]
        assert buffer
        sizes = [slot_nbytes(load, d) for load in self._streamed[prefix]]
        return [(buffer, at) for at in accumulate(sizes[:-1], initial=k * self._strides[d])]

    def ended(self) -> bool:
        """Without waiting, return whether all devices can read the experts. Raises the errors of copies."""
        if self._copying:
            if not self._copying.done():
                return False
            copying, self._copying = self._copying, None
            copying.result()
            for d in self._here:
                self._devices[d].flush(self._buffers[d])  # type: ignore[arg-type]
        return True

    def close(self) -> None:
        """Wait for the copies. Call this before the devices free their memory."""
        self._thread.shutdown(cancel_futures=True)
