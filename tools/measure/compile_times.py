"""Times the compilation of a model's pipelines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

from vkbackend import env
from vkbackend.errors import UnsupportedFeature
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Dispatch
from vkbackend.tools.measure.turns import variable

CACHED = "one, from the cache file"


def dispatches_of(runner: Runner, n_rows: int) -> list[Dispatch]:
    steps = [
        runner.mesh.recorded_step(StepKind.of_run(1, 1)),
        runner.mesh.recorded_step(StepKind.of_run(n_rows, 1)),
    ]
    commands = (c for step in steps for c in step.executables[0].recording.accesses())
    return [c for c in commands if isinstance(c, Dispatch)]


def compile_times(
    runner: Runner, n_rows: int, threads: Sequence[int], repeats: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the first device's number of pipelines, and the seconds of each repetition that compiles all of
    them. The keys are numbers of threads, and CACHED for a start with cached pipelines."""
    from vkbackend.vulkan.device import VulkanDevice
    from vkbackend.vulkan.program import Programs

    device, dispatches = runner.mesh.devices[0], dispatches_of(runner, n_rows)
    if not isinstance(device, VulkanDevice):
        raise UnsupportedFeature(f"{device.name} compiles no pipelines; name a device of Vulkan")

    def seconds(n_threads: int, folder: str) -> float:
        with variable("VKBACKEND_CACHE", folder), variable(env.COMPILE_THREADS, str(n_threads)):
            programs = Programs(device, device.memory, device.transfers)
            try:
                began = time.perf_counter()
                programs.pipelines(dispatches)
                return time.perf_counter() - began
            finally:
                programs.close()

    took: dict[str, list[float]] = {}
    for _ in range(repeats):
        for n in threads:
            with tempfile.TemporaryDirectory() as folder:
                took.setdefault(str(n), []).append(seconds(n, folder))
        with tempfile.TemporaryDirectory() as folder:
            seconds(max(threads), folder)
            took.setdefault(CACHED, []).append(seconds(1, folder))
    return len({(d.op, d.variant, d.consts) for d in dispatches}), took
