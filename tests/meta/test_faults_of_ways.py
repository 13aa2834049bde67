"""In every way to exchange sums, a lost device and a wait that never ends cause a typed error within the
deadline. Sums of other devices stay correct, also when the late device goes on.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, only
from summing import ROWS, WIDTH, Sum, check_a_stuck_device, check_sums

from vkbackend import faults
from vkbackend.errors import DeviceLost, Timeout, UnsupportedFeature
from vkbackend.meta import relay
from vkbackend.meta.ways import PROVIDERS, can_signal
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import SIGNALS
from vkbackend.vulkan.recorded_copies import VulkanCopies
from vkbackend.vulkan.vk import C

pytestmark = pytest.mark.native
N_SUMS = 4
DRIVERS = [p for p in MULTI if p.id in ("0,0,0", "0,1")]
WAYS = [
    pytest.param(provider, signal, *p.values, id=f"{provider}-{signal}-{p.id}", marks=p.marks)
    for (provider, signal, p) in product(PROVIDERS, SIGNALS, DRIVERS)
    if can_signal(provider, signal)
]


def sums_of(names: list[str], seed: int = 3, **how: Any) -> tuple[Sum, np.ndarray]:
    try:
        summed = Sum(open_devices(names), list(range(len(names))), N_SUMS, **how)
    except UnsupportedFeature as error:
        pytest.skip(str(error))
    shape = N_SUMS, len(names), ROWS, WIDTH
    values = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    for i in range(N_SUMS):
        summed.put(i, values[i])
    return summed, values


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1")
    monkeypatch.setattr(relay, "DRAIN_S", 0.3)


@pytest.mark.parametrize(
    ("provider", "signal", "devices"),
    only(WAYS, "ring-flag-0,0,0", "visible-event-0,0,0", "host-sum-flag+event-0,1"),
)
def test_a_device_that_is_lost_in_the_middle(provider: str, signal: str, devices: list[str]) -> None:
    summed, values = sums_of(devices, reduce_provider=provider, reduce_signal=signal)
    check_sums(summed, values)
    opened, lost = summed.mesh.devices, summed.mesh.devices[1]
    # The fault strikes in the middle of the step, after some segments were submitted.
    with (
        faults.inject(faults.Fault(lost.name, "vkQueueSubmit", summed.step.executables[1].n_segments // 2)),
        pytest.raises(DeviceLost, match=lost.name),
    ):
        summed.mesh.run(summed.step)
    with pytest.raises(DeviceLost, match="load it again"):
        summed.mesh.run(summed.step)
    assert lost.lost
    summed.mesh.close()
    assert all(not device.counts for device in opened)
    again, values = sums_of(devices, 4, reduce_provider=provider, reduce_signal=signal)
    check_sums(again, values)
    again.mesh.close()


@pytest.mark.parametrize(
    ("provider", "signal", "devices"),
    only(WAYS, "tree-semaphore-0,0,0", "host-sum-event-0,0,0", "copies-flag-0,1"),
)
def test_a_wait_that_never_ends(provider: str, signal: str, devices: list[str], hurry: None) -> None:
    how: dict[str, Any] = {"reduce_provider": provider, "reduce_signal": signal}
    # A thread of lavapipe that waits for an event occupies a core, so only the stuck device may wait.
    how |= {"submit_ahead": 0} if "event" in signal else {}
    check_a_stuck_device(lambda seed: sums_of(devices, seed, **how))


@pytest.mark.wide
@pytest.mark.parametrize("devices", DRIVERS)
def test_copies_that_never_end(devices: list[str], hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    summed, values = sums_of(devices, reduce_provider="copies")
    check_sums(summed, values)
    monkeypatch.setattr(VulkanCopies, "_ended", lambda self: time.sleep(0.05) or C.VK_TIMEOUT)
    with pytest.raises(Timeout, match="copies of a sum"):
        summed.mesh.run(summed.step)
    monkeypatch.undo()
    with pytest.raises(DeviceLost, match="load it again"):
        summed.mesh.run(summed.step)
    summed.mesh.close()
    again, values = sums_of(devices, 4, reduce_provider="copies")
    check_sums(again, values)
    again.mesh.close()
