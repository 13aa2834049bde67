"""A part of the report: named cases on some devices, whose results are rows of plain values.

A part runs in its own process (worker.py). If the process dies, another process continues after the fatal
case, so a case may use only `rows`, the results of the part on these devices so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vkbackend.models.engine.open_devices import open_devices
from vkbackend.runtime import Device

Row = dict[str, Any]
Group = tuple[str, ...]


class LeftOut(Exception):
    """Raised with the reason why a case does not apply to these devices."""


class Part:
    title: ClassVar[str]
    share: ClassVar[float]  # fraction of the total time; time left by earlier parts is added
    deadline_s: ClassVar[float]  # per case; a case that exceeds it counts as a hang
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, devices: Group, rows: list[Row]) -> None:
        self.devices, self.rows = devices, rows
        self.opened: Device | None = None

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        """Groups of devices that are measured one after another. Default: each device alone."""
        return [(device,) for device in devices]

    @property
    def device(self) -> Device:
        if self.opened is None:
            [self.opened] = open_devices(self.devices[:1])
        return self.opened

    def cases(self) -> list[str]:
        """Return the names of the cases, the most valuable first. Raises the errors of opening devices."""
        raise NotImplementedError

    def run(self, case: str) -> list[Row]:
        """Return the results of a case. Raises LeftOut, and VkbackendError for a failure."""
        raise NotImplementedError

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()

    @classmethod
    def wrong(cls, row: Row) -> str:
        return ""

    @classmethod
    def columns(cls, rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
        """(header, lines) of the table for all groups."""
        head = list(dict.fromkeys(name for row in rows for name in row))
        return head, [[row.get(name, "") for name in head] for row in rows]
