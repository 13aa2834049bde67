"""Recordings of sums over devices, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkbackend import faults
from vkbackend.errors import DeviceLost, Timeout
from vkbackend.meta.graph import Graph
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.sizing import StepShape
from vkbackend.meta.split import partial
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.tensor import Tensor
from vkbackend.runtime import Device

ROWS, WIDTH = 4, 130


class Sum:
    """A recording that adds the devices' partial sums, `length` times in sequence."""

    def __init__(
        self,
        devices: list[Device],
        writers: list[int],
        length: int = 1,
        shape: tuple[int, int] = (ROWS, WIDTH),
        **options: Any,
    ) -> None:
        self.mesh = Mesh(devices, ReduceOptions(**options), keep_values=True)
        self.shape = shape
        self.inputs = [
            self.mesh.stores.constant(f"partial {i}", np.zeros(shape, np.uint32)) for i in range(length)
        ]

        def build(graph: Graph) -> None:
            for i, weight in enumerate(self.inputs):
                views = [weight.whole(d) if d in writers else None for d in range(len(devices))]
                views = [v and type(v)(v.buffer, v.offset, shape) for v in views]
                with graph.scope(f"sum {i}"):
                    graph.all_reduce(Tensor(graph, *shape, partial(writers), views))

        self.mesh.prepare(build, StepShape(shape[0], 0, ((0, 0),) * len(devices)))
        self.step = self.mesh.recorded_step(StepKind.of_run(shape[0], 0))

    def put(self, i: int, values: np.ndarray) -> None:
        """values: float32 [n_devices, *shape]"""
        for d, device in enumerate(self.mesh.devices):
            device.write(self.inputs[i].whole(d), values[d].view(np.uint32))

    def run(self) -> list[list[np.ndarray]]:
        self.mesh.run(self.step)
        names = [name for name in self.step.values if name.endswith(".h")]
        return [
            [
                device.read(view).view(np.float32).reshape(self.shape)
                for device, view in zip(self.mesh.devices, self.step.values[name], strict=True)
                if view is not None
            ]
            for name in names
        ]


def expected(values: np.ndarray, writers: list[int]) -> np.ndarray:
    total = values[writers[0]].copy()
    for d in writers[1:]:
        total = total + values[d]
    return total


def check_sums(summed: Sum, values: np.ndarray) -> None:
    """Run the step, and compare the results of all devices with the sums of `values`."""
    for results, shares in zip(summed.run(), values, strict=True):
        want = expected(shares, list(range(len(shares))))
        assert len(results) == len(shares) and all(np.array_equal(result, want) for result in results)


def check_a_stuck_device(opened: Callable[[int], tuple[Sum, np.ndarray]]) -> None:
    """The second device is never allowed to begin its third segment. The step ends with a typed error within
    5 s. The late device writes its shares after other sums have begun. `opened` creates sums from a seed."""
    summed, values = opened(3)
    check_sums(summed, values)
    stuck, began = summed.mesh.devices[1], time.monotonic()
    call = "vkSetEvent" if "event" in stuck.queue.signal else "vkSignalSemaphore"
    with faults.inject(faults.Fault(stuck.name, f"{call} hang", 3, "hang")):
        with pytest.raises(Timeout, match=stuck.name):
            summed.mesh.run(summed.step)
        assert time.monotonic() - began < 5
        with pytest.raises(DeviceLost, match="load it again"):
            summed.mesh.run(summed.step)
        summed.mesh.close()
    assert stuck.abandoned and not summed.mesh.devices[0].counts
    again, values = opened(4)
    check_sums(again, values)
    stuck.queue.allow(stuck.queue.submitted)  # The late device now writes its shares, to its own memory.
    assert stuck.queue.wait(stuck.queue.submitted, 10)
    check_sums(again, values)
    again.mesh.close()
