"""What a part of the report is: named cases on some devices, and rows of plain values as their results.

A part lives in a process of its own (worker.py). When that dies, another goes on after the case that killed
it; so a case needs nothing of those before it but `rows`, what the part found on these devices so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vkbackend.models.engine.open_devices import open_devices
from vkbackend.runtime import Device

Row = dict[str, Any]
Group = tuple[str, ...]  # devices that a part uses together


class LeftOut(Exception):
    """A case says nothing of these devices: why."""


class Part:
    """One part on one group of devices; subclasses have the cases."""

    title: ClassVar[str]
    share: ClassVar[float]  # share of the time of all parts; the time that earlier parts leave is added
    deadline_s: ClassVar[float]  # for a case; one that takes longer counts as a hang
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, devices: Group, rows: list[Row]) -> None:
        self.devices, self.rows = devices, rows
        self.opened: Device | None = None

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        """The devices that are measured together, one group after another. Here each device by itself."""
        return [(device,) for device in devices]

    @property
    def device(self) -> Device:
        """The first device, opened when it is asked for."""
        if self.opened is None:
            [self.opened] = open_devices(self.devices[:1])
        return self.opened

    def cases(self) -> list[str]:
        """Their names, the most valuable first. Raises what opening devices raises."""
        raise NotImplementedError

    def run(self, case: str) -> list[Row]:
        """The results of a case. Raises LeftOut, and VkbackendError for what failed."""
        raise NotImplementedError

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()

    @classmethod
    def wrong(cls, row: Row) -> str:
        """What a row says is wrong; "": nothing."""
        return ""

    @classmethod
    def columns(cls, rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
        """The rows of all groups as a table: its head and its lines."""
        head = list(dict.fromkeys(name for row in rows for name in row))
        return head, [[row.get(name, "") for name in head] for row in rows]
