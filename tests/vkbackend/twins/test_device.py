from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import UnsupportedFeature
from vkbackend.formats import dequantize, quantize
from vkbackend.ops import Recorder
from vkbackend.pages import HostPages
from vkbackend.recording import Recording
from vkbackend.runtime import Device
from vkbackend.twins.device import HostDevice, NullDevice, NumpyDevice, Values, array_of

pytestmark = pytest.mark.no_vulkan


class Logging(HostDevice):
    def __init__(self) -> None:
        super().__init__("log")
        self.ran: list[str] = []

    def execute(self, command: Any) -> None:
        self.ran.append(command.label)


def steps(device: Device, name: str, n: int) -> Any:
    a = device.buffer(64, Home.SCRATCH, "a")
    recording = Recording(name)
    for i in range(n):
        if i:
            recording.exchange()
        recording.copy(View(a, 0, (1,)), View(a, 32, (1,)), f"{name}{i}")
    return device.build(recording)


def test_segment_runs_only_when_allowed() -> None:
    device = Logging()
    queue, executable = device.queue, steps(device, "a", 4)
    queue.submit(executable, 0, 4)
    assert device.ran == ["a0"] and queue.submitted == 4 and queue.completed() == 1
    assert queue.wait(1, 0.0) and not queue.wait(2, 0.0)
    queue.allow(2)
    assert device.ran == ["a0", "a1"]
    queue.allow(1)  # the counter never decreases
    assert queue.completed() == 2
    queue.allow(4)
    assert device.ran == ["a0", "a1", "a2", "a3"] and queue.wait(4, 0.0)


def test_segment_allowed_before_submission() -> None:
    device = Logging()
    executable = steps(device, "a", 3)
    device.queue.submit(executable, 0, 1)
    device.queue.allow(2)
    assert device.ran == ["a0"]
    device.queue.submit(executable, 1, 2)
    assert device.ran == ["a0", "a1"]


def test_first_segment_waits_for_earlier_executables() -> None:
    device = Logging()
    a, b = steps(device, "a", 2), steps(device, "b", 2)
    device.queue.submit(a, 0, 2)
    device.queue.submit(b, 0, 2)
    assert device.ran == ["a0"]
    device.queue.allow(2)
    assert device.ran == ["a0", "a1", "b0"]
    device.queue.allow(4)
    assert device.ran == ["a0", "a1", "b0", "b1"]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), min_size=1, max_size=6))
def test_segments_run_in_submission_order(plan: list[tuple[int, int]]) -> None:
    device, want = Logging(), []
    for i, (n, allowed) in enumerate(plan):
        device.queue.submit(steps(device, f"{i}.", n), 0, n)
        want += [f"{i}.{s}" for s in range(n)]
        device.queue.allow(allowed)
        done = device.queue.completed()
        assert device.ran == want[:done] and done >= min(allowed, len(want))
        if done < len(want):
            assert done + 1 > max(a for _, a in plan[: i + 1]) and not want[done].endswith(".0")


def test_numpy_runs_the_twins() -> None:
    device = NumpyDevice("numpy")
    a, b, y = (View(device.buffer(64, Home.SCRATCH, name), 0, (2, 8)) for name in "aby")
    device.write(a, np.arange(16, dtype=np.float32))
    device.write(b, np.full(16, 0.5, np.float32))
    recording = Recording("add twice")
    Recorder(recording, device.limits).add(a, b, y)
    Recorder(recording, device.limits).add(y, b, a)
    device.run(recording)
    np.testing.assert_array_equal(device.read(a).view(np.float32), np.arange(16) + 1.0)
    np.testing.assert_array_equal(device.read(y).view(np.float32), np.arange(16) + 0.5)


def test_memory_begins_as_nan_and_is_counted() -> None:
    device = NumpyDevice("numpy")
    buffer = device.buffer(100, Home.KV, "b")
    assert np.isnan(array_of(View(buffer, 0, (25,)))).all() and buffer.nbytes == 256
    assert (device.counts["buffer"], device.created, device.nbytes[Home.KV]) == (1, 1, 256)
    device.free(buffer)
    assert (device.counts["buffer"], device.nbytes[Home.KV], buffer.host) == (0, 0, None)
    device.close()
    assert not device.counts and not device.nbytes


@pytest.mark.parametrize("most_nbytes", [16 << 20, 0])
def test_a_weight_is_dequantized_again_after_a_write(
    most_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Values, "MOST_NBYTES", most_nbytes)
    convert = Mock(side_effect=dequantize)
    monkeypatch.setattr("vkbackend.twins.device.dequantize", convert)
    device = NumpyDevice("numpy")
    w = View(device.buffer(256, Home.WEIGHTS, "w"), 0, (2, 32), "q8_0")
    x, y = (View(device.buffer(256, Home.SCRATCH, name), 0, (1, n)) for name, n in (("x", 32), ("y", 2)))
    device.write(x, np.ones(32, np.float32))
    recording = Recording("product")
    Recorder(recording, device.limits).mat(w, x, y)
    for factor in (1, 1, 2, 1):
        device.write(w, quantize(factor * np.ones((2, 32), np.float32), "q8_0"))
        device.run(recording)
        np.testing.assert_allclose(device.read(y)[:8].view(np.float32), 32 * factor, rtol=1e-3)
    assert convert.call_count == (3 if most_nbytes else 4)
    device.free(w.buffer)  # type: ignore[arg-type]
    assert not device._weights._kept and device._weights._nbytes == 0


def test_imported_pages_are_the_same_bytes() -> None:
    pages = HostPages(4096)
    first, second = NumpyDevice("a"), NumpyDevice("b")
    imported, two = (d.import_pages(pages, "pages") for d in (first, second))
    first.write(View(imported, 8, (2,)), np.array([1.5, 2.5], np.float32))
    assert second.read(View(two, 8, (2,))).view(np.float32).tolist() == [1.5, 2.5]
    assert pages.bytes[8:16].view(np.float32).tolist() == [1.5, 2.5]


def test_null_counts_commands() -> None:
    device = NullDevice("null")
    a, b, y = (View(device.buffer(64, Home.SCRATCH, name), 0, (16,)) for name in "aby")
    recording = Recording("r")
    recording.copy(a, b)
    Recorder(recording, device.limits).add(a, b, y)
    Recorder(recording, device.limits).add(y, b, a)
    device.run(recording)
    assert device.executed == {"add": 2, "copy": 1, "barrier": 3}
    assert np.isnan(array_of(y)).all(), "nothing was computed"


def test_unsupported_import_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="null cannot import host memory"):
        Device.import_pages(NullDevice("null"), HostPages(1), "pages")
    assert isinstance(NullDevice("n").buffer(1, Home.SCRATCH, "b"), Buffer)
