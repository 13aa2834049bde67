"""Simulated devices and models. Devices have the limits and heaps of a real card but no memory, and weights
have no bytes. So models of any size can be planned, placed and recorded, but not run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vkbackend.buffer import Buffer, Home, View, aligned
from vkbackend.device_info import DeviceInfo, Heap
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.twins.device import HostDevice, HostExecutable
from vkbackend.vulkan.memory_types import CACHED, COHERENT, LOCAL, VISIBLE, suitable

MAX_ALLOCATIONS = 4096  # Vulkan's minimum, and the limit of AMD's and NVIDIA's drivers
BINDING_NBYTES = (1 << 32) - 1
ALLOCATION_NBYTES = (1 << 32) - 4096
BAR_NBYTES = 256 << 20
HOST_NBYTES = 128 << 30
# The memory types and heaps of a card without resizable BAR.
TYPES = (
    (LOCAL, 0),
    (VISIBLE | COHERENT, 1),
    (LOCAL | VISIBLE | COHERENT, 2),
    (VISIBLE | COHERENT | CACHED, 1),
)
# A card with matrix units and subgroups of 64.
FEATURES = frozenset(
    "cooperative_matrix float16 full_subgroups host_import int8 int_dot int_dot_accelerated matrix_units "
    "memory_model storage16 storage8 subgroup_arithmetic subgroup_shuffle subgroup_size_control "
    "timeline".split()
)
LIMITS = Limits(
    max_invocations=1024,
    max_shared_nbytes=65_536,
    storage_align=4,
    uniform_align=4,
    max_storage_range=BINDING_NBYTES,
    max_allocation_nbytes=ALLOCATION_NBYTES,
    subgroup_size=64,
    matrix_units=MatrixUnits(lanes=64),
    features=FEATURES,
)


class SimulatedDevice(HostDevice):
    """A simulated card. A device counts `allocations`, the bytes used of each heap (`heaps`), and the size of
    the largest binding (`largest`)."""

    def __init__(self, index: int, memory_nbytes: int, limits: Limits = LIMITS) -> None:
        super().__init__(f"card{index}", limits)
        sizes = (memory_nbytes, HOST_NBYTES, BAR_NBYTES)
        self._info = DeviceInfo(
            index=index,
            name="simulated",
            uuid=f"{index:032x}",
            driver_uuid="",
            vendor="AMD",
            driver="simulated",
            driver_version="1",
            api="1.3",
            type="discrete",
            pci=None,
            heaps=tuple(Heap(n, device_local=i != 1, budget=n) for i, n in enumerate(sizes)),
            features={},
            limits={},
        )
        self.allocations, self.heaps, self.largest = 0, [0] * len(sizes), 0

    @property
    def physical(self) -> DeviceInfo | None:
        return self._info

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        nbytes = aligned(nbytes)
        if nbytes > self.limits.max_allocation_nbytes or self.allocations >= MAX_ALLOCATIONS:
            raise OutOfDeviceMemory(
                f"{self.name}: {label} needs {nbytes} bytes at once, as allocation {self.allocations + 1}",
                requested=nbytes,
            )
        for kind in suitable(TYPES, (1 << len(TYPES)) - 1, home):
            heap = TYPES[kind][1]
            if self.heaps[heap] + nbytes <= self._info.heaps[heap].nbytes:
                self.heaps[heap] += nbytes
                self.allocations += 1
                self.nbytes[home] += nbytes
                return Buffer(nbytes, home, label)
        raise OutOfDeviceMemory(f"{self.name}: no heap has room for {nbytes} bytes of {label}")

    def free(self, buffer: Buffer) -> None:
        pass

    def write(self, view: View, data: np.ndarray) -> None:
        assert data.nbytes <= view.nbytes, (view, data.nbytes)

    def build(self, recording: Recording, *, events: bool = False) -> HostExecutable:
        bound = (view.nbytes for c in recording.stored if isinstance(c, Dispatch) for view in c.bound)
        self.largest = max(self.largest, *bound)
        return super().build(recording)

    def execute(self, command: object) -> None:
        raise AssertionError("a simulated device runs nothing")


class Hollow(Synthetic):
    """A synthetic model whose tensors have full sizes, but share one zero byte."""

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return np.broadcast_to(np.zeros(1, np.uint8), (self.tensors[name].nbytes,))
