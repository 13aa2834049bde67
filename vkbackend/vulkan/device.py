from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env, shaderlib
from vkbackend.buffer import IMPORTED_KIND, Buffer, Home, View
from vkbackend.device_info import DeviceInfo, limits_of
from vkbackend.errors import UnsupportedFeature
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops import measured
from vkbackend.pages import Pages
from vkbackend.recording import Copy, Dispatch, Recording
from vkbackend.runtime import Device
from vkbackend.vulkan import pipeline_report
from vkbackend.vulkan.background_copies import BackgroundCopies
from vkbackend.vulkan.capabilities import free_nbytes
from vkbackend.vulkan.commands import VulkanExecutable
from vkbackend.vulkan.cooperative import BESIDES, FEATURES
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.memory import Memory
from vkbackend.vulkan.program import Programs
from vkbackend.vulkan.queues import FenceQueue, TimelineQueue
from vkbackend.vulkan.recorded_copies import VulkanCopies
from vkbackend.vulkan.transfers import VulkanTransfers
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

CLOSE_S = 5  # seconds that close() waits for running work


class VulkanDevice(LogicalDevice, Device):
    """A logical device with all features that VKBACKEND_DISABLE does not turn off. If `captures` is set, the
    device only compiles for pipeline_report.py, and needs no GPU."""

    compiles = has_codebooks = True

    def __init__(self, info: DeviceInfo, label: str = "", *, captures: bool = False) -> None:
        name = label or f"Vulkan{info.index}"
        features = {k: v for k, v in info.features.items() if k not in env.disabled()}
        # Addresses are faster than bindings only on CPUs.
        features["buffer_address"] = info.is_cpu and bool(features.get("buffer_address"))
        features["executable_info"] = captures and bool(features.get("executable_info"))
        have = limits_of(info)
        self.imports_pages = bool(features.get("host_import"))
        self.maps_files = info.is_cpu and self.imports_pages and have.host_import_align <= mmap.PAGESIZE
        able = frozenset(name for name, value in features.items() if value is True)
        self.limits = replace(have, features=able, choices=tuple(measured.load(info).items()))
        units = usable_units(info, name, features)
        features["memory_model"] = features["memory_model_device"] = bool(units)
        if units:
            able |= {"matrix_units"} | ({"int8_units"} if units.int8_k and "int8" in able else set())
            self.limits = replace(self.limits, features=able, matrix_units=units)
        if env.floor():
            self.limits = replace(
                Limits.floor(),
                max_allocation_nbytes=have.max_allocation_nbytes,
                host_import_align=have.host_import_align,
            )
        self.closed = False
        self.programs: Any = None
        self.copies: BackgroundCopies | None = None
        self.queue: Any = None
        super().__init__(info, name, features)
        self.memory = Memory(self)
        imported = (IMPORTED_KIND,) if self.imports_pages else ()
        self.records_copies = bool(features.get("timeline"))
        self.has_visible = bool(features.get("device_map")) and self.memory.has_visible
        self.host_kinds = (*self.memory.host_kinds, *imported)
        self.nbytes = self.memory.nbytes
        self.transfers = VulkanTransfers(self, self.memory)
        try:
            self.create_pool()
            self.programs = Programs(self, self.memory, self.transfers)
            if not captures:
                self.queue = (TimelineQueue if features.get("timeline") else FenceQueue)(self)
        except BaseException:
            self.close()
            raise
        env.log(
            1,
            f"{self.name}: {info.name}, {info.driver} {info.driver_version}, {self.queue.__class__.__name__}",
        )

    # ---- memory ----

    @property
    def physical(self) -> DeviceInfo:
        return self.info

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        buffer = self.memory.buffer(
            nbytes, home, label, self.host_kind if home in (Home.HOST, Home.STREAM) else ""
        )
        if env.poison():
            self.fill(View(buffer, 0, (buffer.nbytes // 4,)), 0xFFFFFFFF)
        return buffer

    def free(self, buffer: Buffer) -> None:
        self.memory.free(buffer)

    def free_nbytes(self) -> int | None:
        return free_nbytes(self.info) if self.features.get("memory_budget") else None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        if not self.imports_pages:
            raise UnsupportedFeature(f"{self.name} ({self.info.name}) cannot import host memory")
        return self.memory.import_pages(pages, label)

    def flush(self, buffer: Buffer) -> None:
        self.memory.flush(buffer)

    def invalidate(self, buffer: Buffer) -> None:
        self.memory.invalidate(buffer)

    # ---- transfers outside of recordings ----

    def write(self, view: View, data: np.ndarray) -> None:
        self.transfers.write(view, data)

    def read(self, view: View) -> np.ndarray:
        return self.transfers.read(view)

    def read_many(self, views: Sequence[View]) -> list[np.ndarray]:
        return self.transfers.read_many(views)

    def write_many(self, parts: Sequence[tuple[View, np.ndarray]]) -> None:
        self.transfers.write_many(parts)

    def fill(self, view: View, word: int) -> None:
        self.transfers.fill(view, word)

    def drop_upload(self) -> None:
        self.transfers.drop_upload()

    # ---- executables ----

    def compile(self, recording: Recording) -> None:
        self.programs.pipelines([c for c in recording.accesses() if isinstance(c, Dispatch)])

    def compile_ahead(self, recording: Recording) -> None:
        self.programs.begin([c for c in recording.accesses() if isinstance(c, Dispatch)])

    def has_compiled(self, recording: Recording) -> bool:
        return bool(self.programs.are_ready([c for c in recording.accesses() if isinstance(c, Dispatch)]))

    def stop_compiling(self) -> None:
        self.programs.stop()

    def build(self, recording: Recording, *, events: bool = False, timed: bool = False) -> VulkanExecutable:
        ends = self.queue.ends(events)
        executable = VulkanExecutable(self, self.programs, recording, timed=timed, ends=ends)
        try:
            self.queue.prepare(executable)
        except BaseException:
            executable.close()
            raise
        return executable

    @property
    def copies_apart(self) -> bool:  # type: ignore[override]
        return self.transfer_family is not None

    def recorded_copies(self, copies: Sequence[Copy]) -> VulkanCopies:
        return VulkanCopies(self, self.queue, copies)

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        if self.copies is None:
            self.copies = BackgroundCopies(self, self.queue)
        self.copies.begin(copies)

    def copies_ended(self) -> bool:
        return self.copies is None or self.copies.ended()

    def settle(self) -> bool:
        # vkDeviceWaitIdle has no timeout, so wait for a fence.
        if self.queue is None or self.closed:
            return True
        self.queue.release()
        if self.copies is not None and not self.copies.settle(CLOSE_S):
            return False
        fence = ffi.new("VkFence *")
        if lib.vkCreateFence(self.vk, new("VkFenceCreateInfo"), NULL, fence) != C.VK_SUCCESS:
            return False
        result = lib.vkQueueSubmit(self.vk_queue, 0, NULL, fence[0])
        if result == C.VK_SUCCESS:
            result = lib.vkWaitForFences(self.vk, 1, fence, 1, CLOSE_S * 1_000_000_000)
        self.lost |= result == C.VK_ERROR_DEVICE_LOST
        if result == C.VK_TIMEOUT:
            return False
        lib.vkDestroyFence(self.vk, fence[0], NULL)
        return self.lost or result == C.VK_SUCCESS  # after other errors, work may still be running

    def close(self) -> None:
        """If the device does not respond, release nothing, because objects may be in use."""
        if self.closed:
            return
        self.abandoned |= not self.abandoned and not self.settle()
        self.closed = True
        if self.abandoned:
            env.log(1, f"{self.name}: abandoned with {dict(self.counts)}")
            return
        self.drop_upload()
        if self.programs is not None:
            self.programs.close()
        if self.copies is not None:
            self.copies.close()
        if self.queue is not None:
            self.queue.close()
        self.memory.close()
        self.destroy()


def usable_units(info: DeviceInfo, name: str, features: Mapping[str, Any]) -> MatrixUnits | None:
    """Return the first of `info.matrix_units` that is enabled, whose subgroup size is supported and for which
    there is a shader, or None."""
    if not all(features.get(name) for name in BESIDES):
        return None
    default, chosen = info.limits["subgroup_size"], features.get("subgroup_size_control")
    for units in info.matrix_units:
        if features.get(FEATURES[units.api]) and (chosen or units.lanes == default):
            if shaderlib.is_available("mat_mul_coop", f"f16-{units.api}"):
                return units
            env.log(1, f"{name}: {units} unused, no shader for them (see tools/setup.sh)")
    return None


def open_for_report(info: DeviceInfo) -> VulkanDevice:
    """Open a device for `pipeline_report.report_of`. Raises UnsupportedFeature without driver support."""
    device = VulkanDevice(info, captures=True)
    if device.features["executable_info"]:
        return device
    device.close()
    raise UnsupportedFeature(
        f"{info.name}: {info.driver} {info.driver_version} lacks {pipeline_report.EXTENSION} "
        "or has it switched off, so the compiled shaders cannot be read; name a device of another driver "
        "(RADV has it)"
    )
