"""Recordings of sums over devices, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np

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
