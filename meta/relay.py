"""Replay a recorded step on all devices: submit its segments, then wait and signal once per exchange."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vkbackend import env
from vkbackend.errors import Timeout, VkbackendError
from vkbackend.meta.known_ways import ONE_CALL, Ahead
from vkbackend.meta.options import AHEAD
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.reduce import Provider, Reduce
from vkbackend.meta.streams import Fetch, Stream
from vkbackend.runtime import Device

WAIT_SLICE_S = 0.05  # Ctrl-C takes effect within this time.
SPIN_S = 50e-6  # Poll this long before sleeping, because waking up takes about as long.
DRAIN_S = 5.0


class Relay:
    """Replays steps on all devices. `broken` is empty, or the reason why the devices are unusable. `reduce_s`
    adds up the host's seconds from each reduce's last write until the reading devices may run. With ONE_CALL,
    a step that does not fit one call is submitted AHEAD segments ahead."""

    def __init__(self, devices: Sequence[Device], submit_ahead: Ahead) -> None:
        self._devices = devices
        self._ahead = AHEAD if submit_ahead == ONE_CALL else submit_ahead
        self._in_one_call = submit_ahead == ONE_CALL and all(device.queue.ahead for device in devices)
        self._spin = SPIN_S if not any(d.limits.is_cpu for d in devices) else 0.0
        self._bases = [0] * len(devices)  # number of segments of each queue before the step
        self.n_reduces, self.reduce_s = 0, 0.0
        self.stream: Stream | None = None
        self.broken = ""

    def run(self, step: Step, provider: Provider | None) -> None:
        """Replay the step, and wait for all devices. DeviceLost, Timeout and Ctrl-C set `broken`: Ctrl-C may
        interrupt between two calls that must both run."""
        self.broken = "a step was interrupted"
        try:
            self._relay(step, step.executables[0].n_segments, provider)
        except VkbackendError as error:
            self._drain(error)
            raise
        self.broken = ""

    def _relay(self, step: Step, n: int, provider: Provider | None) -> None:
        if self.stream:
            self.stream.begin(step.later)
        for d, device in enumerate(self._devices):
            self._bases[d] = device.queue.submitted
        if self._in_one_call and step.in_one_call:
            for device, executable in zip(self._devices, step.executables, strict=True):
                device.queue.submit_whole(executable)
        self._release(step, min(n, step.lag))
        self._submit_ahead(step, n, step.lag)
        for s in range(1, n):
            self._join(s)
            began, meeting = time.perf_counter(), step.meetings[s - 1]
            if isinstance(meeting, Fetch):
                assert self.stream
                self.stream.meet(meeting)
                began = time.perf_counter()
            elif meeting:
                assert provider is not None
                provider.exchange(meeting)
            self._release(step, min(n, s + step.lag))
            self.reduce_s += time.perf_counter() - began
            self.n_reduces += isinstance(meeting, Reduce) and not meeting.gather
            self._submit_ahead(step, n, s + step.lag)
        self._join(n)

    def _release(self, step: Step, s: int) -> None:
        """Let all devices run segments up to `s`."""
        for d, device in enumerate(self._devices):
            device.queue.allow(self._bases[d] + s)
            self._submit(step, d, s)

    def _submit_ahead(self, step: Step, n: int, s: int) -> None:
        """Submit segments after `s`, up to `n`, while the devices run the segments up to `s`."""
        end = n if self._ahead is None else min(n, s + self._ahead)
        for d, device in enumerate(self._devices):
            if device.queue.ahead:
                self._submit(step, d, end)

    def _submit(self, step: Step, d: int, end: int) -> None:
        queue = self._devices[d].queue
        if (done := queue.submitted - self._bases[d]) < end:
            queue.submit(step.executables[d], done, end - done)

    def _join(self, s: int) -> None:
        for d, device in enumerate(self._devices):
            queue, number = device.queue, self._bases[d] + s
            queue.joined = number
            if queue.arrived(number):
                continue
            began = time.monotonic()
            while self._spin and time.monotonic() - began < self._spin:
                if queue.arrived(number):
                    break
            while not queue.wait(number, WAIT_SLICE_S):
                waited = time.monotonic() - began
                if waited > env.timeout_s():
                    raise Timeout(
                        f"{device.name} did not finish segment {s} of a step within {waited:.0f} s; "
                        "close the model and load it again (VKBACKEND_TIMEOUT sets the limit in seconds)"
                    )

    def _drain(self, error: VkbackendError) -> None:
        self.broken = str(error) or type(error).__name__
        deadline = time.monotonic() + DRAIN_S
        for device in self._devices:
            queue = device.queue
            try:
                queue.allow(queue.submitted)
                done = queue.wait(queue.submitted, max(0.0, deadline - time.monotonic()))
            except VkbackendError:
                done = True  # a lost device has no pending work
            if not done:
                device.abandoned = True
                env.log(1, f"{device.name} does not answer and is abandoned")
