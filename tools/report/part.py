"""A part of the report has named cases, which return rows of plain values.

A part runs in its own process (worker.py). After a crash, a new process continues with the next case. So a
case may depend on earlier cases only through their results in `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import Device

Row = dict[str, Any]
Group = tuple[str, ...]


class LeftOut(Exception):
    """An error with the reason why a case does not apply to the devices."""


class Part:
    title: ClassVar[str]
    share: ClassVar[float]  # Fraction of the total time.
    deadline_s: ClassVar[float]  # A case that takes longer is treated as a hang.
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, devices: Group, rows: list[Row]) -> None:
        self.devices, self.rows = devices, rows
        self.opened: Device | None = None

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        """Return groups of devices to measure in turn. By default each device is a group."""
        return [(device,) for device in devices]

    @property
    def device(self) -> Device:
        if self.opened is None:
            [self.opened] = open_devices(self.devices[:1])
        return self.opened

    def cases(self) -> list[str]:
        """Return the names of the cases, the most valuable first. Raises errors of opening devices."""
        raise NotImplementedError

    def run(self, case: str) -> list[Row]:
        """Return the case's results. Raises LeftOut, or a VkbackendError if the case fails."""
        raise NotImplementedError

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()

    @classmethod
    def wrong(cls, row: Row) -> str:
        return ""

    @classmethod
    def columns(cls, rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
        head = list(dict.fromkeys(name for row in rows for name in row))
        return head, [[row.get(name, "") for name in head] for row in rows]
