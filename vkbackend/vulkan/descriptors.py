"""The descriptor sets of a recording, which one call writes. NumPy fills the arrays of Vulkan's
structs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkbackend.buffer import Buffer, View
from vkbackend.recording import Dispatch
from vkbackend.repeats import Places
from vkbackend.step import BLOCK_NBYTES
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.pipeline_layout import PipelineLayout, descriptor_type
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_INFO = np.dtype([("buffer", "u8"), ("offset", "u8"), ("range", "u8")])
_WRITE = np.dtype(
    [
        *(("sType", "u4"), ("_pad", "u4"), ("pNext", "u8"), ("dstSet", "u8"), ("dstBinding", "u4")),
        *(("dstArrayElement", "u4"), ("descriptorCount", "u4"), ("descriptorType", "u4")),
        *(("pImageInfo", "u8"), ("pBufferInfo", "u8"), ("pTexelBufferView", "u8")),
    ]
)
assert ffi.sizeof("VkDescriptorBufferInfo") == _INFO.itemsize
assert ffi.sizeof("VkWriteDescriptorSet") == _WRITE.itemsize


@dataclass(frozen=True, slots=True)
class Use:
    """A stored dispatch and its `n` uses: the dispatch itself, then its repeats. `places` has the places of
    the args that differ between uses."""

    dispatch: Dispatch
    pipeline: Any
    layout: PipelineLayout
    n: int = 1
    places: Mapping[int, Places] = field(default_factory=dict)


def base_of(device: LogicalDevice, view: View, uniform: bool = False) -> int:
    """Return the view's offset rounded down to the device's alignment, for the descriptor. The remainder is a
    push constant. The alignment is at least 16, so views at multiples of 16 remain aligned within the
    binding."""
    limits = device.info.limits
    align = max(limits["uniform_align" if uniform else "storage_align"], 16)
    assert not uniform or view.offset % align == 0, f"uniform view at {view.offset}, alignment {align}"
    return view.offset // align * align


class DescriptorSets:
    """A descriptor set for each use of each dispatch. `sets` is a VkDescriptorSet[], and `firsts` has the
    index of each dispatch's first use."""

    def __init__(self, device: LogicalDevice, uses: Sequence[Use]) -> None:
        self._device, self._pool = device, None
        self.firsts: list[int] = []
        n_sets = 0
        for use in uses:
            self.firsts.append(n_sets)
            n_sets += use.n
        self.sets = ffi.new("VkDescriptorSet[]", max(n_sets, 1))
        if not n_sets:
            return
        sizes = ffi.new("VkDescriptorPoolSize[2]")
        storage = sum(use.n * (len(use.dispatch.bound) + use.dispatch.rows) for use in uses)
        uniform = sum(use.n * bool(use.dispatch.step) for use in uses)
        sizes[0].type, sizes[0].descriptorCount = descriptor_type(0, 1), max(1, storage)
        sizes[1].type, sizes[1].descriptorCount = descriptor_type(0, 0), max(1, uniform)
        pool = ffi.new("VkDescriptorPool *")
        info = new("VkDescriptorPoolCreateInfo", maxSets=n_sets, poolSizeCount=2, pPoolSizes=sizes)
        device.check(lib.vkCreateDescriptorPool(device.vk, info, NULL, pool), "vkCreateDescriptorPool")
        device.made("VkDescriptorPool")
        self._pool = pool[0]
        try:
            layouts = [layout for use in uses for layout in [use.layout.set_layout] * use.n]
            allocate = new(
                "VkDescriptorSetAllocateInfo",
                descriptorPool=self._pool,
                descriptorSetCount=n_sets,
                pSetLayouts=ffi.new("VkDescriptorSetLayout[]", layouts),
            )
            result = lib.vkAllocateDescriptorSets(device.vk, allocate, self.sets)
            device.check(result, "vkAllocateDescriptorSets")
            self._write(uses)
        except BaseException:
            self.close()
            raise

    def _write(self, uses: Sequence[Use]) -> None:
        n = sum(use.n * len(use.dispatch.bindings) for use in uses)
        infos, writes = np.zeros(n, _INFO), np.zeros(n, _WRITE)
        writes["sType"], writes["descriptorCount"] = C.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET, 1
        writes["pBufferInfo"] = infos.ctypes.data + _INFO.itemsize * np.arange(n, dtype=np.uint64)
        sets = np.frombuffer(ffi.buffer(self.sets), np.uint64)
        handles: dict[Buffer, int] = {}

        def handle_of(buffer: Any) -> int:
            if buffer not in handles:
                handles[buffer] = int(ffi.cast("uintptr_t", buffer.handle))
            return handles[buffer]

        at = 0
        for use, first in zip(uses, self.firsts, strict=True):
            views, n_args = use.dispatch.bindings, len(use.dispatch.bound)
            end = at + use.n * len(views)
            info, write = infos[at:end].reshape(use.n, -1), writes[at:end].reshape(use.n, -1)
            at = end
            if not views:
                continue
            write["dstSet"] = sets[first : first + use.n, None]
            write["dstBinding"] = np.arange(len(views))
            write["descriptorType"] = [descriptor_type(i, n_args) for i in range(len(views))]
            bases, ranges = [], []
            for i, view in enumerate(views):
                assert isinstance(view.buffer, Buffer), f"{view} of {use.dispatch.op} has no address"
                bases.append(base_of(self._device, view, uniform=i == n_args))
                ranges.append(BLOCK_NBYTES if i == n_args else max(4, view.end - bases[-1]))
            limit = self._device.info.limits["max_storage_range"]
            assert max(ranges) <= limit, (
                f"{use.dispatch.label}: binding of {max(ranges)} bytes, limit {limit}"
            )
            info["buffer"] = [handle_of(view.buffer) for view in views]
            info["offset"], info["range"] = bases, ranges
            for arg, places in use.places.items():
                if arg < n_args:
                    info["buffer"][1:, arg] = [handle_of(view.buffer) for view in places.views]
                    info["offset"][1:, arg] += shifts(places)
        pointer = ffi.cast("VkWriteDescriptorSet *", writes.ctypes.data)
        lib.vkUpdateDescriptorSets(self._device.vk, n, pointer, 0, NULL)

    def close(self) -> None:
        if self._pool is not None:
            lib.vkDestroyDescriptorPool(self._device.vk, self._pool, NULL)
            self._device.gone("VkDescriptorPool")
            self._pool = None


def shifts(places: Places) -> np.ndarray:
    """Return the repeats' offsets minus the stored offset, modulo 2^64."""
    return np.array([view.offset - places.base.offset for view in places.views], np.int64).view(np.uint64)
