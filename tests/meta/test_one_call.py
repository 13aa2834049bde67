"""With `submit_ahead="one-call"`, one call of the driver submits all segments of a step to a device. Sums
have the same bits. Only steps whose sums the host writes are submitted in this way.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, only, wide
from summing import ROWS, WIDTH, Sum, check_a_stuck_device, check_sums, expected

from vkbackend import faults
from vkbackend.errors import DeviceLost, UnsupportedFeature
from vkbackend.meta import recorded_steps, relay
from vkbackend.meta.host_sum import HostSum
from vkbackend.meta.known_ways import ONE_CALL, Choice, remember_choice
from vkbackend.meta.recorded_steps import reads_the_host_alone
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.streams import Fetch
from vkbackend.meta.ways import HOST_WRITTEN, WAYS, make_provider
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.recording import Barrier, Pace, Scope
from vkbackend.runtime import SIGNALS
from vkbackend.vulkan.commands import masks
from vkbackend.vulkan.vk import C

pytestmark = pytest.mark.native
N_SUMS = 6
SIGNALED = SIGNALS[:2]  # without events
TWO = [p for p in MULTI if p.id in ("0,0", "0,1")]
WAYS_OF_TWO = [
    pytest.param(provider, signal, *p.values, id=f"{provider}-{signal}-{p.id}", marks=p.marks)
    for provider in HOST_WRITTEN
    for signal in SIGNALED
    for p in TWO
]


def sums_of(names: list[str], seed: int = 7, **how: Any) -> tuple[Sum, np.ndarray]:
    summed = Sum(open_devices(names), list(range(len(names))), N_SUMS, **{"submit_ahead": ONE_CALL} | how)
    shape = N_SUMS, len(names), ROWS, WIDTH
    values = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    put(summed, values)
    return summed, values


def refuses(names: list[str], match: str, **how: Any) -> None:
    opened = open_devices(names)
    with pytest.raises(UnsupportedFeature, match=match):
        Sum(opened, list(range(len(names))), N_SUMS, submit_ahead=ONE_CALL, **how)
    for device in opened:
        device.close()
        assert not device.counts


def put(summed: Sum, values: np.ndarray) -> None:
    for i in range(N_SUMS):
        summed.put(i, values[i])


def counted(summed: Sum) -> Counter[str]:
    """Run the step, and count its submissions on each device."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for device in summed.mesh.devices:

            def submit(*args: Any, call: Any = device.queue._submit, name: str = device.name) -> Any:  # type: ignore[attr-defined]
                counts[name] += 1
                return call(*args)

            patch.setattr(device.queue, "_submit", submit)
        summed.mesh.run(summed.step)
    return counts


@pytest.mark.parametrize(
    ("provider", "signal", "devices"), only(WAYS_OF_TWO, "visible-semaphore-0,1", "host-sum-flag-0,0")
)
def test_one_submission_of_a_device_per_step(provider: str, signal: str, devices: list[str]) -> None:
    summed, values = sums_of(devices, reduce_provider=provider, reduce_signal=signal)
    check_sums(summed, values)
    created = [device.created for device in summed.mesh.devices]
    for _ in range(5):  # these steps use the same semaphores and words again
        values = -values
        put(summed, values)
        check_sums(summed, values)
    before = [device.created for device in summed.mesh.devices]
    assert counted(summed) == {device.name: 1 for device in summed.mesh.devices}
    assert [device.created for device in summed.mesh.devices] == before >= created
    devices_used = summed.mesh.devices
    summed.mesh.close()
    assert all(not device.counts for device in devices_used)


@pytest.mark.wide
@pytest.mark.parametrize("wire", ["f32", "f16"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("signal", SIGNALED)
@pytest.mark.parametrize("provider", HOST_WRITTEN)
def test_the_same_bits_on_2_to_8_devices_of_both_drivers(
    provider: str, signal: str, n: int, wire: str
) -> None:
    names = (["0", "1"] * n)[:n]
    summed, values = sums_of(names, reduce_provider=provider, reduce_signal=signal, reduce_type=wire)
    usual, _ = sums_of(names, reduce_provider="pages", reduce_type=wire, submit_ahead=2)
    for _ in range(5):
        put(summed, values)
        put(usual, values)
        for results, other, shares in zip(summed.run(), usual.run(), values, strict=True):
            assert len(results) == n and all(np.array_equal(r, other[0]) for r in (*results, *other))
            assert wire != "f32" or np.array_equal(results[0], expected(shares, list(range(n))))
        values = -values
    usual.mesh.close()
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
def test_segments_read_what_the_host_wrote_before_they_began(devices: list[str]) -> None:
    """The call that submits a segment makes only earlier writes of the host visible. A barrier makes the sums
    visible, which the host writes after the call."""
    summed, _ = sums_of(devices, reduce_provider="visible")
    for executable in summed.step.executables:
        assert executable.n_segments == N_SUMS + 1
        for segment in executable.recording.segments():
            barrier = segment[0]
            assert isinstance(barrier, Barrier) and barrier.scope is Scope.FROM_HOST
            source, target, written, used = masks(barrier)
            assert source & C.VK_PIPELINE_STAGE_HOST_BIT and written & C.VK_ACCESS_HOST_WRITE_BIT
            assert target & C.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT and used & C.VK_ACCESS_SHADER_READ_BIT
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
@pytest.mark.parametrize("provider", [way.name for way in WAYS if way.name not in HOST_WRITTEN])
def test_ways_in_which_devices_read_other_devices(provider: str, devices: list[str]) -> None:
    refuses(devices, f"host-sum or visible, not {provider}", reduce_provider=provider)


@pytest.mark.parametrize("devices", TWO[:1])
def test_events_and_drivers_without_timelines(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for signal in SIGNALS[2:]:
        refuses(devices, "semaphore or flag", reduce_provider="host-sum", reduce_signal=signal)
    monkeypatch.setenv("VKBACKEND_DISABLE", "timeline")
    refuses(devices, "timeline semaphores", reduce_provider="host-sum")


@pytest.mark.parametrize("devices", TWO[:1])
def test_a_measured_choice_is_used_where_the_host_writes(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune` measures the sums of a token. Larger sums may use another provider."""
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    nbytes = 4 * ROWS * WIDTH
    how = {"submit_ahead": "auto", "reduce_type": "f32"}
    for most, n_submissions in ((nbytes, 1), (nbytes - 4, N_SUMS + 1)):
        opened = open_devices(devices)
        choice = Choice(((most, "visible"), (1 << 40, "pages")), "flag", ONE_CALL)
        remember_choice(opened, choice)
        for device in opened:
            device.close()
        summed, values = sums_of(devices, **how)
        check_sums(summed, values)
        assert set(counted(summed).values()) == {n_submissions}
        assert summed.mesh.devices[0].queue.signal == "flag"
        summed.mesh.close()
    summed, values = sums_of(devices, **how, reduce_provider="visible", reduce_signal="event")
    check_sums(summed, values)
    assert set(counted(summed).values()) == {N_SUMS + 1}
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
def test_a_step_that_is_divided_for_a_watchdog(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver might merge the submissions of a call."""
    monkeypatch.setattr(recorded_steps, "pace_of", lambda device: Pace(1.0, 1.0))
    summed, values = sums_of(devices, reduce_provider="visible")
    assert not summed.step.in_one_call
    check_sums(summed, values)
    assert min(counted(summed).values()) > N_SUMS + 1
    summed.mesh.close()


@pytest.mark.no_vulkan
def test_steps_that_read_more_than_the_host_wrote() -> None:
    devices = open_devices(["numpy", "numpy"])
    by_host, pages = (make_provider(devices, 4096, name) for name in ("host-sum", "pages"))
    assert isinstance(by_host, HostSum)
    reduce = Reduce(0, 16, (0, 1))
    assert reads_the_host_alone([reduce, None], by_host) and reads_the_host_alone([None], None)
    assert not reads_the_host_alone([None, reduce], pages)
    assert not reads_the_host_alone([reduce, Fetch()], by_host)
    for provider in (by_host, pages):
        provider.close()


@pytest.mark.parametrize(("provider", "signal", "devices"), only(WAYS_OF_TWO, "visible-flag-0,0"))
def test_a_device_that_is_lost(provider: str, signal: str, devices: list[str]) -> None:
    how = {"reduce_provider": provider, "reduce_signal": signal}
    for call, nth in (("vkQueueSubmit", 1), ("vkSignalSemaphore", 3), ("vkGetSemaphoreCounterValue", 4)):
        summed, values = sums_of(devices, **how)
        check_sums(summed, values)
        opened, lost = summed.mesh.devices, summed.mesh.devices[1]
        began = time.monotonic()
        with faults.inject(faults.Fault(lost.name, call, nth)), pytest.raises(DeviceLost, match=lost.name):
            for _ in range(5):
                summed.mesh.run(summed.step)
        with pytest.raises(DeviceLost, match="load it again"):
            summed.mesh.run(summed.step)
        summed.mesh.close()
        assert lost.lost and time.monotonic() - began < 5  # type: ignore[attr-defined]
        assert all(not device.counts for device in opened)
    again, values = sums_of(devices, 4, **how)
    check_sums(again, values)
    again.mesh.close()


@pytest.mark.parametrize(("provider", "signal", "devices"), only(WAYS_OF_TWO, "host-sum-semaphore-0,0"))
def test_a_wait_that_never_ends(
    provider: str, signal: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1")
    monkeypatch.setattr(relay, "DRAIN_S", 0.3)
    how = {"reduce_provider": provider, "reduce_signal": signal}
    check_a_stuck_device(lambda seed: sums_of(devices, seed, **how))


@pytest.mark.parametrize("devices", [*TWO[:1], wide(TWO[1])])
def test_closing_ends_a_submission_that_waits(devices: list[str]) -> None:
    summed, values = sums_of(devices, reduce_provider="visible")
    check_sums(summed, values)
    opened = summed.mesh.devices
    for device, executable in zip(opened, summed.step.executables, strict=True):
        device.queue.submit_whole(executable)
        assert not device.queue.wait(device.queue.submitted, 0.05)
    began = time.monotonic()
    summed.mesh.close()
    assert time.monotonic() - began < 5
    assert all(not device.abandoned and not device.counts for device in opened)
