from __future__ import annotations

from typing import Any

import pytest

from vkbackend.errors import DeviceLost, OutOfDeviceMemory, VkbackendError
from vkbackend.limits import Limits, plausible

pytestmark = pytest.mark.native
ZERO = (
    "maxComputeWorkGroupInvocations",
    "maxComputeSharedMemorySize",
    "maxStorageBufferRange",
    "maxPerStageDescriptorStorageBuffers",
    "maxMemoryAllocationCount",
)


class Driver:
    def __init__(self, lib: Any, **functions: Any) -> None:
        self._lib = lib
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)


def reported(device: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> Any:
    from vkbackend.vulkan import capabilities
    from vkbackend.vulkan.instance import instance
    from vkbackend.vulkan.vk import NULL, C, ffi

    kinds = {"MAINTENANCE_3": "Maintenance3", "MAINTENANCE_4": "Maintenance4", "SUBGROUP": "Subgroup"}
    structs = {
        getattr(
            C, f"VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_{kind}_PROPERTIES"
        ): f"VkPhysicalDevice{name}Properties"
        for kind, name in kinds.items()
    }
    real = capabilities.lib.vkGetPhysicalDeviceProperties2

    def properties(physical: Any, base: Any) -> None:
        real(physical, base)
        change("VkPhysicalDeviceProperties", base.properties)
        at = ffi.cast("VkBaseOutStructure *", base.pNext)
        while at != NULL:
            if name := structs.get(at.sType):
                change(name, ffi.cast(f"{name} *", at))
            at = ffi.cast("VkBaseOutStructure *", at.pNext)

    lib = Driver(capabilities.lib, vkGetPhysicalDeviceProperties2=properties)
    monkeypatch.setattr(capabilities, "lib", lib)
    return capabilities.describe(instance().handle, device.info.physical, instance().version)


def test_zeros_become_vulkan_guarantees(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.device_info import limits_of

    def forget(name: str, struct: Any) -> None:
        if name == "VkPhysicalDeviceProperties":
            for limit in ZERO:
                setattr(struct.limits, limit, 0)
            for i in range(3):
                struct.limits.maxComputeWorkGroupCount[i] = 0
            struct.limits.timestampPeriod = 0
        elif name == "VkPhysicalDeviceMaintenance3Properties":
            struct.maxMemoryAllocationSize = 0
        elif name == "VkPhysicalDeviceSubgroupProperties":
            struct.subgroupSize = 0

    info = reported(device, monkeypatch, forget)
    got, floor = limits_of(info), Limits.floor()
    for field in ("max_invocations", "max_shared_nbytes", "max_groups", "max_storage_range"):
        assert getattr(got, field) == getattr(floor, field), field
    assert got.max_allocation_nbytes == info.limits["max_allocation_nbytes"] == 1 << 30
    assert info.limits["max_allocations"] == 4096 and got.subgroup_size >= 1
    assert info.limits["timestamp_valid_bits"] == 0, "a counter without a period"


@pytest.mark.parametrize(
    ("allocation", "buffer"), [((1 << 64) - 1, 1 << 31), (1 << 31, (1 << 64) - 1), (1 << 30, 0)]
)
def test_the_smaller_of_allocation_and_buffer(
    device: Any, allocation: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VK_KHR_maintenance4 has a separate limit for the size of buffers."""
    seen = []

    def change(name: str, struct: Any) -> None:
        seen.append(name)
        if name == "VkPhysicalDeviceMaintenance3Properties":
            struct.maxMemoryAllocationSize = allocation
        elif name == "VkPhysicalDeviceMaintenance4Properties":
            struct.maxBufferSize = buffer

    info = reported(device, monkeypatch, change)
    if "VkPhysicalDeviceMaintenance4Properties" not in seen:
        pytest.skip(f"{device.name} has no maintenance4")
    assert info.limits["max_allocation_nbytes"] == (min(allocation, buffer) or 1 << 30)


def test_reported_limits_are_not_changed() -> None:
    limits = {"max_invocations": 1, "storage_align": 0, "max_allocation_nbytes": (1 << 64) - 1}
    assert plausible(limits) == limits


def test_missing_budgets() -> None:
    from vkbackend.device_info import Heap, left_of

    heaps = Heap(100, True, 0), Heap(1000, False, 0), Heap(50, True, 0)
    assert left_of(heaps, [90, 1000, 40], [10, 0, 0]) == 80
    assert left_of(heaps, [200, 1000, 40], [10, 0, 0]) == 90, "no more than the heap"
    assert left_of(heaps, [0, 1000, 40], [10, 0, 50]) == 0
    assert left_of(heaps, [0, 1000, 0], [10, 0, 0]) is None


def test_failing_device_does_not_hide_others(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.vulkan import instance

    every, real = instance.devices(), instance.describe

    def describe(handle: Any, physical: Any, version: int) -> Any:
        if physical == every[0].physical:
            raise VkbackendError("vkEnumerateDeviceExtensionProperties: VK_ERROR_INITIALIZATION_FAILED")
        return real(handle, physical, version)

    monkeypatch.setattr(instance, "describe", describe)
    left = instance.devices()
    assert [d.name for d in left] == [d.name for d in every[1:]]
    assert [d.index for d in left] == list(range(len(left)))


def test_too_large_counter_means_a_lost_device(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device is lost, its driver may set the semaphore to the largest value."""
    from vkbackend.vulkan.queues import TimelineQueue
    from vkbackend.vulkan.vk import C

    if not device.features.get("timeline"):
        pytest.skip(f"{device.name} has no timeline semaphores")
    queue = TimelineQueue(device)
    assert queue.completed() == 0 and queue.wait(0, 0)

    def counter(vk: Any, semaphore: Any, value: Any) -> int:
        value[0] = (1 << 64) - 1
        return int(C.VK_SUCCESS)

    monkeypatch.setattr(queue, "_counter", counter)
    monkeypatch.setattr(queue, "_wait", lambda *_: int(C.VK_SUCCESS))
    monkeypatch.setattr(device, "lost", False)
    for ask in (queue.completed, lambda: queue.wait(1, 0)):
        with pytest.raises(DeviceLost, match=device.name):
            ask()
    queue.close()


def test_settle_fails_if_the_fence_is_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `settle` cannot submit a fence, objects may still be in use and must not be destroyed."""
    from vkbackend.vulkan import device as module
    from vkbackend.vulkan.vk import C

    opened = module.VulkanDevice(device.info)
    assert opened.settle()
    lib = Driver(module.lib, vkQueueSubmit=lambda *_: int(C.VK_ERROR_OUT_OF_HOST_MEMORY))
    monkeypatch.setattr(module, "lib", lib)
    assert not opened.settle()
    monkeypatch.undo()
    opened.close()
    assert not opened.counts


@pytest.mark.parametrize(("fails_at", "left"), [(5, 2), (1, 0), (99, 3)])
def test_segment_numbers_are_not_reused_after_failed_submit(
    device: Any, fails_at: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three segments has two submissions. Each submission is a call of its own, because an H100 reads
    stale host memory in the later submissions of a call."""
    from types import SimpleNamespace

    from vkbackend.vulkan.queues import TimelineQueue
    from vkbackend.vulkan.signals import Ends
    from vkbackend.vulkan.vk import C, ffi

    if not device.features.get("timeline"):
        pytest.skip(f"{device.name} has no timeline semaphores")
    queue, calls = TimelineQueue(device), []

    def submit(vk_queue: Any, n: int, infos: Any, fence: Any) -> int:
        calls.append(n)
        return int(C.VK_ERROR_OUT_OF_DEVICE_MEMORY if len(calls) == fails_at else C.VK_SUCCESS)

    monkeypatch.setattr(queue, "_submit", submit)
    waits, signals = [0] * 6, [0] * 6
    submission = ffi.new("VkSubmitInfo[]", 6), None, waits, signals, None, [0, 2, 4, 6]
    step: Any = SimpleNamespace(submission=submission, ends=Ends())
    try:
        if fails_at <= 6:
            with pytest.raises(OutOfDeviceMemory, match="vkQueueSubmit"):
                queue.submit(step, 0, 3)
        else:
            queue.submit(step, 0, 3)
        assert queue.submitted == left and calls == [1] * min(6, fails_at)
        assert waits[::2] == signals[1::2] == [1, 2, 3]
        queue.submit(step, 1, 2)
        assert waits[2::2] == signals[3::2] == [left + 1, left + 2] and queue.submitted == left + 2
    finally:
        queue.close()
