"""Measures the time that one device loses if its step for a token has as many segments as in a group of
devices."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from vkbackend.meta.relay import Relay
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Barrier, Command, Exchange, Recording, derive_barriers
from vkbackend.tools.measure.timing import Timer

REPEATS = 7
LIMIT_S = 10.0  # No repeat starts after this many seconds.


def cut_times(runner: Runner, timer: Timer) -> tuple[float, float]:
    """Return two times of a token's step on the runner's only device, in seconds. The first step runs as
    recorded. The second step has two segments per layer, and the host releases the segments one by one."""
    timer.after(0, 0, 1)
    mesh = runner.mesh
    [device] = mesh.devices
    step = max(mesh.steps.by_kind.values(), key=lambda of: of.used)
    recording = cut_evenly(step.executables[0].recording, 2 * runner.model.n_layer)
    executable = device.build(recording)
    try:
        cut = replace(step, executables=[executable], meetings=[None] * (executable.n_segments - 1))
        relay = Relay([device], 2)
        taken: dict[str, list[float]] = {"whole": [], "cut": []}
        first = time.perf_counter()
        while not taken["cut"] or (len(taken["cut"]) < REPEATS and time.perf_counter() - first < LIMIT_S):
            for name, of in (("whole", step), ("cut", cut)):
                began = time.perf_counter()
                relay.run(of, None)
                taken[name].append(time.perf_counter() - began)
    finally:
        executable.close()
    return statistics.median(taken["whole"]), statistics.median(taken["cut"])


def cut_evenly(recording: Recording, n: int) -> Recording:
    """Return a recording with up to n segments, which have about equal numbers of commands."""
    accesses = list(recording.accesses())
    n = min(n, len(accesses))
    ends = {len(accesses) * i // n for i in range(1, n)}
    commands: list[Command] = []
    for at, command in enumerate(accesses):
        commands += [Exchange("cut"), command] if at in ends else [command]
    assert not any(isinstance(command, Barrier) for command in commands)
    return derive_barriers(Recording(recording.name, commands))
