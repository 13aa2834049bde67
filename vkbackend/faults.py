"""Makes a Vulkan call fail or a device hang, for tests.

Call `inject`, or set VKBACKEND_FAULT=DEVICE:CALL:NTH:RESULT, such as
Vulkan0.1:vkQueueSubmit:3:VK_ERROR_DEVICE_LOST. If the result of vkSignalSemaphore is `hang`, the device waits
forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vkbackend import env


@dataclass(slots=True)
class Fault:
    """From the `nth` call on, the Vulkan function `call` returns `result` on `device`."""

    device: str
    call: str
    nth: int = 1
    result: str = "VK_ERROR_DEVICE_LOST"
    seen: int = 0

    def strikes(self, device: str, call: str) -> bool:
        if device != self.device or not call.startswith(self.call):
            return False
        self.seen += 1
        return self.seen >= self.nth


def _from_environment() -> list[Fault]:
    return [Fault(*item) for item in env.faults()]


planned: list[Fault] = _from_environment()


@contextmanager
def inject(fault: Fault) -> Iterator[Fault]:
    planned.append(fault)
    try:
        yield fault
    finally:
        planned.remove(fault)


def struck(device: str, call: str) -> str | None:
    """Return the result that a planned fault injects into this call, or None."""
    return next((fault.result for fault in planned if fault.strikes(device, call)), None)
