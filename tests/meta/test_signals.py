"""Results have the same bits for every kind of signal between host and devices. A device that is lost or
never answers causes a typed error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, some, wide
from summing import ROWS, WIDTH, Sum, expected

from vkbackend import faults
from vkbackend.errors import DeviceLost, Timeout, UnsupportedFeature
from vkbackend.meta import relay
from vkbackend.meta.known_ways import Choice, remember_choice
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS, can_signal
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.recording import Exchange, Recording
from vkbackend.runtime import SIGNALS
from vkbackend.vulkan import signals

pytestmark = pytest.mark.native
N_SUMS = 6
TWO = [p for p in MULTI if p.id in ("0,0", "0,1")]
DEPTHS = [pytest.param(ahead, id=f"ahead {ahead}") for ahead in (0, 2, None)]


def sums_of(names: list[str], **how: Any) -> tuple[Sum, np.ndarray]:
    """By default, the host writes the sums, because events require it."""
    how = {"reduce_provider": "host-sum"} | how
    summed = Sum(open_devices(names), list(range(len(names))), N_SUMS, **how)
    values = np.random.default_rng(7).uniform(-1, 1, (N_SUMS, len(names), ROWS, WIDTH)).astype(np.float32)
    for i in range(N_SUMS):
        summed.put(i, values[i])
    return summed, values


def check(summed: Sum, values: np.ndarray) -> None:
    writers = list(range(values.shape[1]))
    for results, shares in zip(summed.run(), values, strict=True):
        assert all(np.array_equal(r, expected(shares, writers)) for r in results)


@pytest.mark.parametrize(
    ("signal", "ahead", "devices"),
    [
        *(
            pytest.param(s, *d.values, *t.values, id=f"{s}-{d.id}-{t.id}", marks=t.marks)
            for (s, d, t) in zip(SIGNALS[1:], DEPTHS, [*TWO, TWO[0]], strict=True)
        ),
        *(
            pytest.param(
                s, *d.values, ["0", "1"] * n, id=f"{s}-{d.id}-{2 * n} devices", marks=pytest.mark.wide
            )
            for s in SIGNALS[1:]
            for d in DEPTHS
            for n in (1, 2, 4)
        ),
    ],
)
def test_every_signal_gives_the_same_bits(signal: str, ahead: int | None, devices: list[str]) -> None:
    summed, values = sums_of(devices, reduce_signal=signal, submit_ahead=ahead)
    check(summed, values)
    created = [device.created for device in summed.mesh.devices]
    for _ in range(5):  # these steps use the same words and events again
        values = -values
        for i in range(N_SUMS):
            summed.put(i, values[i])
        check(summed, values)
    before = [device.created for device in summed.mesh.devices]
    summed.mesh.run(summed.step)
    assert [device.created for device in summed.mesh.devices] == before >= created
    devices_used = summed.mesh.devices
    summed.mesh.close()
    assert all(not device.counts for device in devices_used)


@pytest.mark.parametrize("wire", ["f32", "f16"])
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.wide) for n in (2, 3, 4, 5, 8)])
@pytest.mark.parametrize(
    ("provider", "signal"), [(p, s) for p in PROVIDERS for s in SIGNALS if can_signal(p, s)]
)
def test_every_way_on_2_to_8_devices_of_both_drivers(provider: str, signal: str, n: int, wire: str) -> None:
    """With the f16 wire, all ways agree with `pages`, whose rounding other tests check."""
    names = (["0", "1"] * n)[:n]
    how = {"reduce_signal": signal, "submit_ahead": (None, 0, 2)[n % 3], "reduce_type": wire}
    try:
        summed, values = sums_of(names, reduce_provider=provider, **how)
    except UnsupportedFeature as error:
        pytest.skip(str(error))
    usual, _ = sums_of(names, reduce_provider="pages", reduce_type=wire)
    for _ in range(2):
        for i in range(N_SUMS):
            summed.put(i, values[i])
            usual.put(i, values[i])
        for results, other, shares in zip(summed.run(), usual.run(), values, strict=True):
            assert len(results) == n and all(np.array_equal(r, other[0]) for r in (*results, *other))
            assert wire != "f32" or np.array_equal(results[0], expected(shares, list(range(n))))
        values = -values
    usual.mesh.close()
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
def test_a_flag_needs_no_call_of_the_driver(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    summed, values = sums_of(devices, reduce_signal="flag", submit_ahead=None)
    check(summed, values)
    for device in summed.mesh.devices:
        queue, last = device.queue, device.queue.submitted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue, "completed", lambda: pytest.fail("a call of the driver"))
            assert all(queue.arrived(last - n) for n in range(1, 1 + N_SUMS))
        assert queue.arrived(last) and not queue.arrived(last + 1)
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
def test_a_flag_that_is_never_written_ends_in_the_semaphore(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, values = sums_of(devices, reduce_signal="flag")
    monkeypatch.setattr(signals.Flag, "count", 0)
    check(summed, values)
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
@pytest.mark.parametrize("signal", ["event", wide(pytest.param("flag+event", id="flag+event"))])
def test_an_event_that_is_never_set(signal: str, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    summed, _ = sums_of(devices, reduce_signal=signal)
    stuck = summed.mesh.devices[1]
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1")
    monkeypatch.setattr(relay, "DRAIN_S", 0.5)
    with faults.inject(faults.Fault(stuck.name, "vkSetEvent hang", 3, "hang")):
        with pytest.raises(Timeout, match=stuck.name):
            summed.mesh.run(summed.step)
        with pytest.raises(DeviceLost, match="load it again"):
            summed.mesh.run(summed.step)
    assert stuck.abandoned
    stuck.queue.allow(stuck.queue.submitted)  # the process can end only when the device has finished
    assert stuck.queue.wait(stuck.queue.submitted, 10)
    summed.mesh.close()


@pytest.mark.parametrize("devices", TWO[:1])
@pytest.mark.parametrize("provider", [p for p in ("auto", *PROVIDERS) if p not in HOST_WRITTEN])
def test_an_event_where_devices_read_other_devices(provider: str, devices: list[str]) -> None:
    """A segment that waits for an event already runs when the other devices write."""
    opened = open_devices(devices)
    with pytest.raises(
        UnsupportedFeature, match=f"reduce_signal event .* host-sum or visible, not {provider}"
    ):
        Sum(opened, [0, 1], N_SUMS, reduce_provider=provider, reduce_signal="event")
    for device in opened:
        device.close()
        assert not device.counts


@pytest.mark.parametrize("devices", [*TWO[:1], wide(TWO[1])])
def test_only_steps_whose_sums_the_host_writes_wait_for_events(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of `tune`, or of an older version, may have other providers for larger sums."""
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    nbytes = 4 * ROWS * WIDTH
    for ways, by_events in (
        (((nbytes, "visible"), (1 << 40, "pages")), True),
        (((nbytes - 4, "visible"), (1 << 40, "pages")), False),
        (((1 << 40, "copies"),), False),
    ):
        opened = open_devices(devices)
        remember_choice(opened, Choice(ways, "flag+event", 2))
        for device in opened:
            device.close()
        summed, values = sums_of(devices, reduce_provider="auto")
        check(summed, values)
        for executable in summed.step.executables:
            ends = executable.ends  # type: ignore[attr-defined]
            assert (ends.events is not None) is by_events and ends.flag
        summed.mesh.close()


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("n_segments", [2, 4])
@pytest.mark.parametrize("devices", TWO[:1])
def test_steps_with_and_without_events_in_turn(
    devices: list[str], n_segments: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host allows a step's first segments before it submits the step, so the queue then still has the
    signal of the step before."""
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "5")
    summed, values = sums_of(devices, reduce_provider="visible", reduce_signal="event")
    device = summed.mesh.devices[0]
    plain = Recording("plain", [Exchange()] * (n_segments - 1))
    executables = [device.build(plain, events=events) for events in (True, False, False, True, True, False)]
    queue = device.queue
    for executable in executables * 2:
        assert executable.n_segments == n_segments
        base = queue.submitted
        for s in range(1, n_segments + 1):
            queue.allow(base + min(n_segments, s + lag - 1))
            if (done := queue.submitted - base) < n_segments:
                queue.submit(executable, done, min(n_segments, s + lag + 1) - done)
            assert queue.wait(base + s, 5), f"segment {s} of {executable.ends}"  # type: ignore[attr-defined]
    check(summed, values)
    for executable in executables:
        executable.close()
    summed.mesh.close()


LOST = [
    ("vkQueueSubmit", 4, "event"),
    ("vkSetEvent", 3, "event"),
    ("vkGetSemaphoreCounterValue", 2, "flag"),
    ("vkCreateEvent", 2, "event"),
    ("vkQueueSubmit", 4, "flag"),
    ("vkSetEvent", 1, "flag+event"),
    ("vkGetSemaphoreCounterValue", 3, "flag+event"),
]


@pytest.mark.parametrize("devices", TWO[:1])
@pytest.mark.parametrize(("call", "nth", "signal"), some([pytest.param(*lost) for lost in LOST], 2))
def test_a_device_that_is_lost_in_the_middle(call: str, nth: int, signal: str, devices: list[str]) -> None:
    opened = open_devices(devices)
    summed = None
    with faults.inject(faults.Fault(opened[1].name, call, nth)), pytest.raises(DeviceLost, match=r"0\.1"):
        summed = Sum(opened, [0, 1], N_SUMS, reduce_provider="visible", reduce_signal=signal)
        for _ in range(20):
            summed.mesh.run(summed.step)
    if summed:
        summed.mesh.close()
    for device in opened:
        device.close()
    assert opened[1].lost and not opened[1].counts


def test_a_signal_that_no_device_has() -> None:
    with pytest.raises(UnsupportedFeature, match=r"numpy.*flag; use semaphore"):
        Sum(open_devices(["numpy", "numpy"]), [0, 1], reduce_signal="flag")
