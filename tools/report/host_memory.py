"""Measures the rates of shader reads and copies for each kind of pinned host memory, and the rates of reads
by two devices at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from vkbackend.meta.host_memory import HostRates, measure_host_memory, measure_pair
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.tools.report.part import Group, LeftOut, Part, Row

ALONE, TOGETHER = "each kind of memory", "both devices at once"
HEAD = ("memory", "read GB/s", "copy GB/s", "read with copies GB/s", "copy with reads GB/s")


def cells(kind: str, of: HostRates) -> list[str | float]:
    return [kind, *(rate / 1e9 for rate in (of.read, of.copy, of.read_with_copy, of.copy_with_read))]


class HostMemory(Part):
    title = "Reads of pinned host memory over the bus"
    share, deadline_s = 0.03, 60.0

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        return [*((device,) for device in devices), *combinations(devices, 2)]

    def cases(self) -> list[str]:
        return [ALONE if len(self.devices) == 1 else TOGETHER]

    def run(self, case: str) -> list[Row]:
        if case == ALONE:
            if not (rates := measure_host_memory(self.device)):
                raise LeftOut("the runtime does not choose kinds of host memory")
            return [dict(zip(HEAD, cells(kind, of), strict=True)) for kind, of in rates.items()]
        first, second = open_devices(self.devices)
        try:
            a, b = measure_pair(first, second)
        finally:
            first.close()
            second.close()
        return [
            {"memory": case, "read GB/s": (a + b) / 1e9, "of the first": a / 1e9, "of the second": b / 1e9}
        ]
