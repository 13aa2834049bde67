"""Queues that run segments in order, with two timeline semaphores (`go`, `done`) or a fence.

The host signals `go`. Segment n waits for `go` >= n, or for an event, and signals `done` = n at its end. A
host signal orders only execution, so recordings contain memory barriers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vkbackend import env, faults
from vkbackend.errors import Timeout, VkbackendError
from vkbackend.runtime import SIGNALS, Queue
from vkbackend.vulkan.commands import VulkanExecutable
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.signals import Ends, Events, Flag
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


class TimelineQueue(Queue):
    """Submits the segments of a step before they may run."""

    ahead = True

    def __init__(self, device: LogicalDevice) -> None:
        self.device = device
        self.submitted = 0
        self._semaphores = ffi.new("VkSemaphore[2]")  # go, done
        kind = new("VkSemaphoreTypeCreateInfo", semaphoreType=C.VK_SEMAPHORE_TYPE_TIMELINE)
        self._flag: Flag | None = None
        self._events: Events | None = None
        self._n_made = 0
        try:
            for i in range(2):
                info = new("VkSemaphoreCreateInfo", kind)
                result = lib.vkCreateSemaphore(device.vk, info, NULL, self._semaphores + i)
                device.check(result, "vkCreateSemaphore")
                device.made("VkSemaphore")
                self._n_made += 1
        except VkbackendError:
            self.close()
            raise
        self._counter = device.function("vkGetSemaphoreCounterValue", promoted=True)
        self._wait = device.function("vkWaitSemaphores", promoted=True)
        self._signal = device.function("vkSignalSemaphore", promoted=True)
        self._submit = device.function("vkQueueSubmit")
        self._value = ffi.new("uint64_t *")
        self._wait_value = ffi.new("uint64_t *")
        self._wait_info = new(
            "VkSemaphoreWaitInfo",
            semaphoreCount=1,
            pSemaphores=self._semaphores + 1,
            pValues=self._wait_value,
        )
        self._signal_info = new("VkSemaphoreSignalInfo", semaphore=self._semaphores[0])
        self._go, self._signaled = 0, 0  # segments up to `_go` may run; the value of the semaphore `go`
        self._numbered = 0  # the number of the last segment that was to be submitted
        # A portability driver (Metal) may lack events.
        can_wait = "VK_KHR_portability_subset" not in device.extensions
        self.signals = SIGNALS if can_wait else SIGNALS[:2]
        self.following: Any = None  # copies that signal `go` instead of the host
        self._by_events = False  # whether the submitted executable waits for events
        self._flagged = range(0)  # the numbers of segments that the flag counts
        self._held: deque[tuple[int, int]] = deque()  # segments that wait for events: (number, segment)

    @property
    def go(self) -> Any:
        return self._semaphores

    @property
    def done(self) -> Any:
        return self._semaphores + 1

    def ends(self, events: bool) -> Ends:
        """Return the flag and the events that the next executable records, as `signal` requires. Without
        `events`, segments wait for semaphores. Raises UnsupportedFeature."""
        ways = self.signal.split("+")
        events = events and "event" in ways
        if "flag" in ways and self._flag is None:
            self._flag = Flag(self.device)
        if events and self._events is None:
            self._events = Events(self.device)
        return Ends(self._flag if "flag" in ways else None, self._events if events else None)

    def prepare(self, executable: VulkanExecutable) -> None:
        """Create a VkSubmitInfo for each command buffer. Later, `submit` changes only the semaphore
        values."""
        parts = executable.parts
        n = sum(map(len, parts))
        infos, timelines = ffi.new("VkSubmitInfo[]", n), ffi.new("VkTimelineSemaphoreSubmitInfo[]", n)
        waits, signals = ffi.new("uint64_t[]", n), ffi.new("uint64_t[]", n)
        stage = ffi.new("VkPipelineStageFlags *", C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT)
        at, firsts = 0, []
        for s, segment in enumerate(parts):
            firsts.append(at)
            for p in range(len(segment)):
                timelines[at].sType = C.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO
                infos[at].sType = C.VK_STRUCTURE_TYPE_SUBMIT_INFO
                infos[at].pNext = timelines + at
                infos[at].commandBufferCount = 1
                infos[at].pCommandBuffers = segment[p]
                if s and not p and not executable.ends.events:
                    timelines[at].waitSemaphoreValueCount = infos[at].waitSemaphoreCount = 1
                    timelines[at].pWaitSemaphoreValues = waits + at
                    infos[at].pWaitSemaphores = self._semaphores
                    infos[at].pWaitDstStageMask = stage
                if p == len(segment) - 1:
                    timelines[at].signalSemaphoreValueCount = infos[at].signalSemaphoreCount = 1
                    timelines[at].pSignalSemaphoreValues = signals + at
                    infos[at].pSignalSemaphores = self._semaphores + 1
                at += 1
        executable.submission = infos, timelines, waits, signals, stage, [*firsts, n]

    def submit(self, executable: Any, first: int, count: int) -> None:
        infos, *_, firsts = executable.submission
        self._number(executable, first, count)
        # Submit each command buffer with a call of its own. If one call submitted all of them, an H100
        # (driver 580) used stale cache lines of host memory that the host had written before it signaled
        # `go`. Barriers and volatile reads did not help. Also, drivers may merge the submissions of a call,
        # which undoes Cuts.
        for s in range(first, first + count):
            for at in range(firsts[s], firsts[s + 1]):
                result = self._submit(self.device.vk_queue, 1, infos + at, NULL)
                self.device.check(result, "vkQueueSubmit")
            self.submitted += 1
        self._pass_on()

    def submit_whole(self, executable: Any) -> None:
        infos, *_, firsts = executable.submission
        assert not executable.ends.events, "events may be set only before the submission that waits for them"
        self._number(executable, 0, executable.n_segments)
        result = self._submit(self.device.vk_queue, firsts[-1], infos, NULL)
        self.device.check(result, "vkQueueSubmit")
        self.submitted += executable.n_segments

    def _number(self, executable: Any, first: int, count: int) -> None:
        """Set the semaphore values of `count` segments, and reset their events and the flag."""
        _, _, waits, signals, _, firsts = executable.submission
        ends = executable.ends
        self._numbered = self.submitted + count
        self._by_events = ends.events is not None
        if ends.flag and not first:
            ends.flag.clear()
            self._flagged = range(self.submitted + 1, self.submitted + executable.n_segments)
        for s in range(first, first + count):
            number = self.submitted + 1 + s - first
            if ends.events and s:
                ends.events.reset(s)
                self._held.append((number, s))
            waits[firsts[s]] = number
            signals[firsts[s + 1] - 1] = number

    def _pass_on(self) -> None:
        """Signal segments up to `_go` as the submitted executable requires. `allow` may have allowed its
        first segments before it was submitted, when another executable required another signal."""
        while self._events and self._held and self._held[0][0] <= self._go:
            self._events.set(self._held[0][1])
            self._held.popleft()
        if not self._by_events and self._signaled < self._go:
            self._signaled = self._signal_info.value = self._go
            self.device.check(self._signal(self.device.vk, self._signal_info), "vkSignalSemaphore")

    def arrived(self, number: int) -> bool:
        if self._flag and number in self._flagged:
            return self._flagged.start + self._flag.count > number
        return self.completed() >= number

    def completed(self) -> int:
        device = self.device
        device.check(self._counter(device.vk, self._semaphores[1], self._value), "vkGetSemaphoreCounterValue")
        done = int(self._value[0])
        if done > self.submitted:  # on a lost device, the counter may be the largest integer
            device.check(C.VK_ERROR_DEVICE_LOST, "vkGetSemaphoreCounterValue")
        return done

    def allow(self, number: int) -> None:
        call = "vkSetEvent" if self._by_events else "vkSignalSemaphore"
        if faults.planned and faults.struck(self.device.name, f"{call} hang") == "hang":
            return
        if number <= self._go:
            return
        self._go = number
        if self.following:
            copies, self.following, self._signaled = self.following, None, number
            copies.signal(number)
            return
        self._pass_on()

    def wait(self, number: int, timeout_s: float) -> bool:
        self._wait_value[0] = number
        result = self._wait(self.device.vk, self._wait_info, int(timeout_s * 1e9))
        if result == C.VK_TIMEOUT:
            return False
        self.device.check(result, "vkWaitSemaphores")
        return self.completed() >= number  # on a lost device, vkWaitSemaphores may succeed

    def release(self) -> None:
        # A device may have received segments with an error, so they are not counted as submitted.
        self._go = max(self._go, self._numbered)
        if self._signaled < self._numbered:
            self._signaled = self._signal_info.value = self._numbered
            self._signal(self.device.vk, self._signal_info)
        if self._events:
            for _, segment in self._held:  # on a lost device, the result does not matter
                lib.vkSetEvent(self.device.vk, self._events.of(segment)[0])
            self._held.clear()

    def close(self) -> None:
        if self._events:
            self._events.close()
        for i in range(self._n_made):
            lib.vkDestroySemaphore(self.device.vk, self._semaphores[i], NULL)
            self.device.gone("VkSemaphore")


class FenceQueue(Queue):
    """Submits one segment at a time with a fence, on devices without timeline semaphores (Vulkan 1.2)."""

    ahead = False

    def __init__(self, device: LogicalDevice) -> None:
        self.device = device
        self.submitted = 0
        self._done = 0
        self._fence = ffi.new("VkFence *")
        device.check(
            lib.vkCreateFence(device.vk, new("VkFenceCreateInfo"), NULL, self._fence), "vkCreateFence"
        )
        device.made("VkFence")

    def prepare(self, executable: VulkanExecutable) -> None:
        executable.submission = [
            [
                new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=segment[p])
                for p in range(len(segment))
            ]
            for segment in executable.parts
        ]

    def submit(self, executable: Any, first: int, count: int) -> None:
        for s in range(first, first + count):
            if self.submitted > self._done and not self.wait(self.submitted, env.timeout_s()):
                raise Timeout(f"{self.device.name} did not finish a segment within {env.timeout_s()} s")
            *cut, last = executable.submission[s]
            for info, fence in (*((info, NULL) for info in cut), (last, self._fence[0])):
                self.device.check(lib.vkQueueSubmit(self.device.vk_queue, 1, info, fence), "vkQueueSubmit")
            self.submitted += 1

    def completed(self) -> int:
        if self.submitted > self._done:
            result = lib.vkGetFenceStatus(self.device.vk, self._fence[0])
            if result != C.VK_NOT_READY:
                self.device.check(result, "vkGetFenceStatus")
                self.device.check(lib.vkResetFences(self.device.vk, 1, self._fence), "vkResetFences")
                self._done = self.submitted
        return self._done

    def allow(self, number: int) -> None:
        pass  # segments are submitted only when they may run

    def wait(self, number: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.completed() < number:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            result = lib.vkWaitForFences(self.device.vk, 1, self._fence, 1, int(left * 1e9))
            if result != C.VK_TIMEOUT:
                self.device.check(result, "vkWaitForFences")
        return True

    def ends(self, events: bool) -> Ends:
        return Ends()

    def release(self) -> None:
        pass  # no segment waits

    def close(self) -> None:
        lib.vkDestroyFence(self.device.vk, self._fence[0], NULL)
        self.device.gone("VkFence")
