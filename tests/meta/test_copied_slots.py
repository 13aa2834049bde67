"""All-reduces that copy partial sums between devices, on the compute queue or on a separate queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, wide
from summing import ROWS, WIDTH, Sum, expected

from vkbackend import faults
from vkbackend.errors import DeviceLost, Timeout
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.vulkan import recorded_copies
from vkbackend.vulkan.vk import C

pytestmark = pytest.mark.native
TWO = [p for p in MULTI if p.id in ("0,0", "0,1")]
N_SUMS = 5


def opened(names: list[str], apart: bool) -> list[Any]:
    """If `apart`, copies are ordered by semaphores, as on a transfer queue. Software drivers have one queue,
    so nothing may then be submitted ahead."""
    devices: list[Any] = open_devices(names)
    for device in devices if apart else ():
        device.transfer_family = device.family
    return devices


def summed_by_copies(devices: list[Any], **how: Any) -> tuple[Sum, np.ndarray]:
    n = len(devices)
    summed = Sum(devices, list(range(n)), N_SUMS, reduce_provider="copies", **how)
    values = np.random.default_rng(3).uniform(-1, 1, (N_SUMS, n, ROWS, WIDTH)).astype(np.float32)
    for i in range(N_SUMS):
        summed.put(i, values[i])
    return summed, values


SETS = [*TWO, pytest.param(["0", "1"] * 4, id="8 devices", marks=pytest.mark.wide)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("signal", ["flag", pytest.param("semaphore", marks=pytest.mark.wide)])
@pytest.mark.parametrize("devices", [SETS[0], *map(wide, SETS[1:])])
def test_sums_are_exact_and_record_nothing_twice(devices: list[str], signal: str, apart: bool) -> None:
    devices_used = opened(devices, apart)
    summed, values = summed_by_copies(devices_used, reduce_signal=signal, submit_ahead=0 if apart else 2)
    for _ in range(4):
        for results, shares in zip(summed.run(), values, strict=True):
            assert all(np.array_equal(r, expected(shares, list(range(len(devices))))) for r in results)
    before = [device.created for device in devices_used]
    summed.mesh.run(summed.step)
    assert [device.created for device in devices_used] == before
    summed.mesh.close()
    assert not any(device.counts for device in devices_used)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("call", ["vkQueueSubmit of copies", "vkWaitForFences of copies"])
@pytest.mark.parametrize("devices", TWO[:1])
def test_a_device_that_is_lost_while_it_copies(devices: list[str], call: str, apart: bool) -> None:
    devices_used = opened(devices, apart)
    summed, _ = summed_by_copies(devices_used, submit_ahead=0)
    name = devices_used[1].name
    with faults.inject(faults.Fault(name, call, 3)), pytest.raises(DeviceLost, match=name):
        summed.mesh.run(summed.step)
    with pytest.raises(DeviceLost, match="load it again"):
        summed.mesh.run(summed.step)
    summed.mesh.close()
    assert devices_used[1].lost


@pytest.mark.parametrize("devices", TWO[:1])
def test_copies_that_never_end(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    devices_used = opened(devices, apart=False)
    summed, _ = summed_by_copies(devices_used)
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1")
    monkeypatch.setattr(recorded_copies.VulkanCopies, "_ended", lambda self: C.VK_TIMEOUT)
    with pytest.raises(Timeout, match="copies of a sum"):
        summed.mesh.run(summed.step)
    assert devices_used[0].abandoned
    summed.mesh.close()
