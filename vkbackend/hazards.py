"""Checks a recording's barriers, and reports conflicts that no barrier orders. Two accesses conflict if they
overlap and one is a write.

The check shares no code with derive_barriers. Unlike validation layers, it checks writes after writes,
in-place updates, reused scratch memory, and host memory around exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.buffer import Buffer, View, Virtual
from vkbackend.recording import (
    HOST_HOMES,
    Barrier,
    Copy,
    Dispatch,
    Exchange,
    Range,
    Recording,
    Scope,
    ranges,
)


@dataclass(frozen=True, slots=True)
class Hazard:
    """`kind` is, for example, read-after-write."""

    kind: str
    first: str
    second: str
    where: Range

    def __str__(self) -> str:
        return f"{self.kind}: {self.first} then {self.second} at {self.where}"


def _name(index: int, command: Dispatch | Copy) -> str:
    kind = command.op if isinstance(command, Dispatch) else "copy"
    return f"#{index} {kind} {command.label}".rstrip()


@dataclass(frozen=True, slots=True)
class _Access:
    """A read or write. `open_to_copies` is true until a barrier makes later copies wait for this access.
    `open_to_dispatches` is true until a barrier makes later dispatches wait."""

    where: Range
    is_write: bool
    is_copy: bool
    name: str
    apart: int = 0
    open_to_copies: bool = True
    open_to_dispatches: bool = True

    def after(self, barrier: Barrier) -> _Access | None:
        """Return the access after a barrier, or None if every later command waits for the access."""
        if self.is_copy and not barrier.after_copies:
            return self
        left = replace(
            self, open_to_copies=self.open_to_copies and not barrier.before_copies, open_to_dispatches=False
        )
        return left if left.open_to_copies else None


def check(recording: Recording) -> list[Hazard]:
    hazards: list[Hazard] = []
    unordered: dict[Buffer | Virtual, list[_Access]] = defaultdict(list)
    # device writes to host memory since the last TO_HOST barrier
    host_pending: list[tuple[Range, str]] = []
    host_wrote = True  # the host may have written since the last FROM_HOST barrier

    def end_of_segment() -> None:
        hazards.extend(
            Hazard("host-read-after-device-write", name, "exchange", r) for r, name in host_pending
        )
        host_pending.clear()

    for index, command in enumerate(recording.commands):
        if isinstance(command, Barrier):
            if command.scope is Scope.TO_HOST:  # only the host waits
                host_pending.clear()
            else:
                for buffer, earlier in unordered.items():
                    unordered[buffer] = [left for access in earlier if (left := access.after(command))]
            if command.scope is Scope.FROM_HOST:
                host_wrote = False
        elif isinstance(command, Exchange):
            end_of_segment()
            host_wrote = True
        elif isinstance(command, Dispatch | Copy):
            name, is_copy = _name(index, command), isinstance(command, Copy)
            part = command.apart if isinstance(command, Dispatch) else 0
            accesses = [(r, False) for r in command.reads] + [(w, True) for w in command.writes]
            for where, is_write in accesses:
                is_host = isinstance(where.buffer, Buffer) and where.buffer.home in HOST_HOMES
                if is_host and host_wrote:
                    hazards.append(Hazard("device-access-after-host-write", "host", name, where))
                if is_host and is_write:
                    host_pending.append((where, name))
                for other in unordered[where.buffer]:
                    conflict = (is_write or other.is_write) and where.overlaps(other.where)
                    conflict = conflict and not (is_write and other.is_write and 0 < part == other.apart)
                    if conflict and (other.open_to_copies if is_copy else other.open_to_dispatches):
                        kind = (
                            f"{'write' if is_write else 'read'}-after-{'write' if other.is_write else 'read'}"
                        )
                        hazards.append(Hazard(kind, other.name, name, where))
            hazards += [
                Hazard("in-place", name, name, w)
                for w in command.writes
                for r in command.reads
                if w.overlaps(r)
            ]
            for where, is_write in accesses:
                unordered[where.buffer].append(_Access(where, is_write, is_copy, name, part))
    end_of_segment()
    return hazards


def check_copies(recording: Recording, copies: Sequence[Copy], by_table: Sequence[View] = ()) -> list[Hazard]:
    """Return a recording's conflicts with copies that run at the same time. Reads of the views in `by_table`
    do not conflict, because a step reads only the slots that its table names (meta/expert_slots.py)."""
    hazards, tables = [], set(ranges(by_table))
    for index, command in enumerate(recording.commands):
        if not isinstance(command, Dispatch | Copy):
            continue
        accesses = [(r, False) for r in command.reads if r not in tables]
        accesses += [(w, True) for w in command.writes]
        for copy in copies:
            of_copy = [(r, False) for r in copy.reads] + [(w, True) for w in copy.writes]
            for where, is_write in accesses:
                for other, other_writes in of_copy:
                    if (is_write or other_writes) and where.overlaps(other):
                        name = f"background copy {copy.label}".rstrip()
                        hazards.append(Hazard("access-during-copy", name, _name(index, command), where))
    return hazards
