"""Steps do not wait for background copies. With poison, targets are NaN until the copies have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from device_sets import device_params, for_every_runtime

from vkbackend import faults
from vkbackend.buffer import Home, View
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.open_device import open_device
from vkbackend.recording import Copy, Recording
from vkbackend.runtime import Device
from vkbackend.twins.device import NumpyDevice
from vkbackend.vulkan import capabilities
from vkbackend.vulkan.device import VulkanDevice

DEADLINE_S = 30


def words(device: Device, home: Home, values: np.ndarray) -> View:
    view = View(device.buffer(values.nbytes, home, home.value), 0, values.shape, "u32")
    device.write(view, values)
    return view


def part(view: View, begin: int, end: int) -> View:
    return View(view.buffer, view.offset + 4 * begin, (end - begin,), "u32")


def finish(device: Device) -> int:
    deadline, n = time.monotonic() + DEADLINE_S, 1
    while not device.copies_ended():
        assert time.monotonic() < deadline, "the copies do not end"
        n += 1
    return n


@pytest.fixture(
    params=[
        *(for_every_runtime(p, wide=i > 0) for i, p in enumerate(device_params())),
        pytest.param(None, id="numpy"),
    ]
)
def opened(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device(request.param) if request.param else NumpyDevice("numpy")
    yield device
    device.close()
    assert not device.counts


GRAPHICS, COMPUTE, TRANSFER, SPARSE, DECODE, FLOW = 1, 2, 4, 8, 32, 256
FAMILIES = {
    "copies": ([GRAPHICS | COMPUTE | TRANSFER | SPARSE, TRANSFER | SPARSE, COMPUTE | TRANSFER], 1),
    "video first": ([GRAPHICS | COMPUTE | TRANSFER, TRANSFER | DECODE, TRANSFER | FLOW, TRANSFER], 3),
    "video only": ([GRAPHICS | COMPUTE | TRANSFER, COMPUTE | TRANSFER, TRANSFER | DECODE], None),
    "one": ([GRAPHICS | COMPUTE | TRANSFER], None),
}


@pytest.mark.parametrize(("flags", "family"), FAMILIES.values(), ids=FAMILIES)
def test_the_family_of_a_copy_engine(
    flags: list[int], family: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = [SimpleNamespace(queueFlags=of_family) for of_family in flags]
    monkeypatch.setattr(capabilities, "enumerate_all", lambda *_, **__: families)
    assert capabilities.transfer_family(None) == family


@pytest.mark.parametrize("by_semaphores", [False, True])
def test_batches_of_copies(opened: Device, by_semaphores: bool) -> None:
    """Each batch copies two ranges. Steps read the targets of ended batches. Software drivers have no
    transfer queue. With `by_semaphores`, the compute queue orders copies by semaphores, as a transfer queue
    does."""
    if by_semaphores:
        if not isinstance(opened, VulkanDevice):
            pytest.skip("only native devices have semaphores")
        opened.transfer_family = opened.family
    values = np.arange(100, dtype=np.uint32)
    source, target = (words(opened, home, values) for home in (Home.HOST, Home.WEIGHTS))
    out = words(opened, Home.SCRATCH, values)
    read = Recording("read")
    read.copy(target, out)
    want = values.copy()
    for i in range(4):
        first, second = (part(source, at, at + 7) for at in (40 + i, 3))
        opened.begin_copies([Copy(first, part(target, 0, 7)), Copy(second, part(target, 90 - i, 97 - i))])
        finish(opened)
        want[:7], want[90 - i : 97 - i] = values[40 + i : 47 + i], values[3:10]
        opened.run(read)
        assert np.array_equal(opened.read(out).view(np.uint32), want)
        assert opened.copies_ended()
        if isinstance(opened, VulkanDevice):
            assert opened.counts["VkCommandPool"] == 2


@pytest.mark.parametrize("info", [*device_params(), pytest.param(None, id="numpy")])
def test_targets_are_nan_until_the_first_poll(
    info: DeviceInfo | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKBACKEND_POISON", "1")
    device = VulkanDevice(info) if info else NumpyDevice("numpy")
    values = np.arange(64, dtype=np.uint32)
    source, target = words(device, Home.HOST, values), words(device, Home.WEIGHTS, values[::-1])
    device.begin_copies([Copy(part(source, 8, 16), part(target, 8, 16))])
    during = device.read(target).view(np.uint32)
    assert (during[8:16] == 0xFFFFFFFF).all() and np.array_equal(during[:8], values[::-1][:8])
    finish(device)
    want = values[::-1].copy()
    want[8:16] = values[8:16]
    assert np.array_equal(device.read(target).view(np.uint32), want)
    device.close()
    assert not device.counts


@pytest.mark.native
@pytest.mark.parametrize("info", device_params())
def test_closing_waits_for_copies(info: DeviceInfo) -> None:
    device = VulkanDevice(info)
    values = np.zeros(1 << 18, np.uint32)
    source, target = words(device, Home.HOST, values), words(device, Home.WEIGHTS, values)
    device.begin_copies([Copy(source, target)])
    device.close()
    assert not device.counts and not device.abandoned


@pytest.mark.native
@pytest.mark.parametrize("info", device_params()[:1])
def test_copies_that_were_not_submitted_never_end(info: DeviceInfo) -> None:
    device = VulkanDevice(info)
    values = np.zeros(64, np.uint32)
    source, target = words(device, Home.HOST, values), words(device, Home.WEIGHTS, values)
    fault = faults.Fault(device.name, "vkQueueSubmit of copies", 1, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with faults.inject(fault), pytest.raises(OutOfDeviceMemory):
        device.begin_copies([Copy(source, target)])
    assert not device.copies_ended()
    device.close()
    assert not device.counts and not device.abandoned
