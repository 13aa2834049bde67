"""A recording lists the dispatches and copies of one device, with the byte ranges that they read and write.

A recording consists of segments. After a segment, the device exchanges data with other devices. Only this
module derives barriers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, pairwise
from typing import NamedTuple

from vkbackend.buffer import Buffer, Home, View, Virtual


class Range(NamedTuple):
    buffer: Buffer | Virtual
    begin: int
    end: int

    def overlaps(self, other: Range) -> bool:
        return self.buffer is other.buffer and self.begin < other.end and other.begin < self.end


def ranges(views: Iterable[View]) -> tuple[Range, ...]:
    return tuple([Range(v.buffer, v.offset, v.offset + v.nbytes) for v in views])


FIRST_HEAD = "first_head"  # push constant of ops with one workgroup per head along y


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as View
class Dispatch:
    """`args` are storage buffers in binding order. `step` is StepParams, or None if the shader does not read
    StepParams."""

    op: str
    variant: str
    args: tuple[View, ...]
    written: tuple[int, ...]  # Indices of the args that the shader writes.
    # (name, value) of each push constant after the word offsets of the args.
    push: tuple[tuple[str, int | float], ...]
    consts: tuple[tuple[str, int], ...]  # (name, value) of each specialization constant, in order of ids.
    groups: tuple[int, int, int]
    step: View | None = None
    label: str = ""
    flops: int = 0
    # the shader gets 64-bit addresses of the args, not bindings
    addressed: bool = False
    rows: bool = False  # whether the shader reads the step's rows
    # Dispatches with the same number write different parts of one output, so they may run together (0: none).
    apart: int = field(default=0, compare=False)
    reads: tuple[Range, ...] = field(init=False, compare=False, repr=False)
    writes: tuple[Range, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        views = [v for i, v in enumerate(self.args) if i not in self.written]
        self.reads = ranges([*views, self.step] if self.step else views)
        self.writes = ranges([self.args[i] for i in self.written])

    def with_views(self, args: Sequence[View], step: View | None) -> Dispatch:
        """Return the dispatch with other views. `dataclasses.replace` takes 1.6 times as long."""
        d = self
        return Dispatch(
            *(d.op, d.variant, tuple(args), d.written, d.push, d.consts, d.groups, step),
            *(d.label, d.flops, d.addressed, d.rows, d.apart),
        )

    @property
    def bound(self) -> tuple[View, ...]:
        return () if self.addressed else self.args

    @property
    def n_step(self) -> int:
        """Return the number of bindings of StepParams: a uniform block, and a storage buffer if `rows`."""
        return 1 + self.rows if self.step else 0

    @property
    def bindings(self) -> tuple[View, ...]:
        return self.bound + (self.step,) * self.n_step if self.step else self.bound

    def parts(self, n: int) -> list[Dispatch]:
        """Split the heads over up to `n` dispatches. An op without FIRST_HEAD is not split."""
        push, (x, heads, z) = dict(self.push), self.groups
        n = min(n, heads) if FIRST_HEAD in push else 1
        if n == 1:
            return [self]
        bounds = [heads * i // n for i in range(n + 1)]
        return [
            replace(
                self,
                push=tuple((push | {FIRST_HEAD: push[FIRST_HEAD] + begin}).items()),
                groups=(x, end - begin, z),
                flops=self.flops * (end - begin) // heads,
            )
            for begin, end in pairwise(bounds)
        ]


@dataclass(frozen=True, slots=True)
class Copy:
    src: View
    dst: View
    label: str = ""

    @property
    def reads(self) -> tuple[Range, ...]:
        return ranges([self.src])

    @property
    def writes(self) -> tuple[Range, ...]:
        return ranges([self.dst])


class Scope(Enum):
    """The writers before a barrier -> the readers after it."""

    DEVICE = "device -> device"
    TO_HOST = "device -> host"
    FROM_HOST = "host and device -> device"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Makes later commands wait for earlier commands. Both stage masks include the compute stage. A mask
    includes the transfer stage only if it is for commands with copies, because an unused stage makes some
    GPUs wait longer."""

    scope: Scope
    after_copies: bool = True
    before_copies: bool = True


@dataclass(frozen=True, slots=True)
class Exchange:
    """Ends a segment. The host and other devices then read this device's writes to host memory, and may write
    host memory for the next segment."""

    label: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """Ends a submission within a segment, because a driver's watchdog limits a submission's duration."""


Access = Dispatch | Copy


def apart(a: Access, b: Access) -> bool:
    """Return whether two commands write different words, although the ranges that they write overlap."""
    return isinstance(a, Dispatch) and isinstance(b, Dispatch) and a.apart == b.apart > 0


Command = Access | Barrier | Exchange | Cut

HOST_HOMES = (Home.STAGING, Home.PAGES, Home.STREAM)


@dataclass(slots=True)
class Recording:
    """A named list of commands. After recording, call `place` and `derive_barriers`."""

    name: str
    commands: list[Command] = field(default_factory=list)

    def dispatch(self, dispatch: Dispatch) -> None:
        self.commands.append(dispatch)

    def copy(self, src: View, dst: View, label: str = "") -> None:
        assert src.nbytes == dst.nbytes, f"copy of {src.nbytes} B into {dst.nbytes} B"
        self.commands.append(Copy(src, dst, label))

    def exchange(self, label: str = "") -> None:
        self.commands.append(Exchange(label))

    @property
    def stored(self) -> list[Command]:
        """Return the commands without repeats (repeats.py)."""
        return self.commands

    @property
    def n_commands(self) -> int:
        return len(self.commands)

    @property
    def has_cuts(self) -> bool:
        return any(isinstance(c, Cut) for c in self.commands)

    @property
    def n_segments(self) -> int:
        return 1 + sum(isinstance(c, Exchange) for c in self.commands)

    def accesses(self) -> Iterator[Access]:
        return (c for c in self.commands if isinstance(c, Dispatch | Copy))

    def segments(self) -> list[list[Command]]:
        """The last segment follows the last exchange."""
        parts: list[list[Command]] = [[]]
        for command in self.commands:
            if isinstance(command, Exchange):
                parts.append([])
            else:
                parts[-1].append(command)
        return parts

    def place(self, placements: Mapping[Virtual, View]) -> Recording:
        def at(view: View) -> View:
            if isinstance(view.buffer, Buffer):
                return view
            home = placements[view.buffer]
            return View(home.buffer, home.offset + view.offset, view.shape, view.dtype)

        def moved(command: Command) -> Command:
            if isinstance(command, Dispatch):
                return command.with_views([*map(at, command.args)], command.step and at(command.step))
            if isinstance(command, Copy):
                return replace(command, src=at(command.src), dst=at(command.dst))
            return command

        return Recording(self.name, [moved(c) for c in self.commands])


def interleave(a: Recording, b: Recording, label: str) -> Recording:
    """Merge two recordings by alternating their segments. Additional exchanges get `label`."""
    lanes = [(r.segments(), exchanges(r)) for r in (a, b)]
    n = max(len(segments) for segments, _ in lanes)
    commands: list[Command] = []
    for i in range(n):
        for segments, marks in lanes:
            commands += segments[i] if i < len(segments) else []
            commands.append(marks[i] if i < len(marks) else Exchange(label))
    return Recording(a.name, commands[:-1])


# Some drivers reset the device if a submission takes more than 2 s.
SUBMISSION_S = 0.5
OVER_BUS = (Home.HOST, *HOST_HOMES, Home.MAPPED)


@dataclass(frozen=True, slots=True)
class Pace:
    """Bytes per second that a device reads from its memory and from host memory. The defaults are for slow
    GPUs."""

    memory: float = 10e9
    host: float = 10e9

    @property
    def flops(self) -> float:
        """Estimate the FLOP/s as 10 FLOP per byte of memory bandwidth. GPUs without matrix units have peaks
        of 15 (integrated, with one channel of DDR4) to 80 FLOP per byte. Products with many rows reach two
        thirds of the peak."""
        return 10 * self.memory

    def seconds(self, command: Access) -> float:
        """Estimate the longest time of a command. Reads overlap with arithmetic but not with other reads."""
        over_bus = in_memory = 0
        for r in command.reads:
            if isinstance(r.buffer, Buffer) and r.buffer.home in OVER_BUS:
                over_bus += r.end - r.begin
            else:
                in_memory += r.end - r.begin
        flops = command.flops if isinstance(command, Dispatch) else 0
        return max(over_bus / self.host + in_memory / self.memory, flops / self.flops)


SLOW = Pace()


def cut_long(recording: Recording, pace: Pace = SLOW) -> Recording:
    """Insert Cuts so that each submission's estimated time is below SUBMISSION_S. If a single dispatch takes
    longer, it is split by heads, provided that its op allows."""
    divided = in_parts(recording, pace)
    commands: list[Command] = []
    begin = 0
    for at in cut_positions((c, seconds_of(c, pace)) for c in divided.commands):
        commands += [*divided.commands[begin:at], Cut()]
        begin = at
    return Recording(recording.name, commands + divided.commands[begin:])


def cut_positions(commands: Iterable[tuple[Command, float]]) -> list[int]:
    """Return the indices of the commands before which a submission ends. `commands` has the estimated seconds
    of each command. A submission ends before the barriers of the first command that does not fit."""
    positions: list[int] = []
    spent, n_barriers = 0.0, 0
    for at, (command, cost) in enumerate(commands):
        if isinstance(command, Barrier):
            n_barriers += 1
            continue
        if isinstance(command, Exchange):
            spent = 0.0
        elif spent and spent + cost > SUBMISSION_S:
            positions.append(at - n_barriers)
            spent = cost
        else:
            spent += cost
        n_barriers = 0
    return positions


def seconds_of(command: Command, pace: Pace) -> float:
    return pace.seconds(command) if isinstance(command, Dispatch | Copy) else 0.0


def in_parts(recording: Recording, pace: Pace = SLOW) -> Recording:
    """If a dispatch takes longer than SUBMISSION_S, split it by heads, provided that its op allows."""
    return Recording(
        recording.name, list(chain.from_iterable(_in_parts(c, pace) for c in recording.commands))
    )


def _in_parts(command: Command, pace: Pace) -> Sequence[Command]:
    if isinstance(command, Dispatch) and (seconds := pace.seconds(command)) > SUBMISSION_S:
        return command.parts(math.ceil(seconds / SUBMISSION_S))
    return (command,)


def _is_host(ranges: Iterable[Range]) -> bool:
    return any(isinstance(r.buffer, Buffer) and r.buffer.home in HOST_HOMES for r in ranges)


def derive_barriers(recording: Recording) -> Recording:
    """Insert barriers between dependent commands.

    A barrier covers all memory. A command needs a barrier if it accesses a range written since the previous
    barrier, or writes a range read since then. Dispatches with the same number `apart` need no barrier
    between their writes. A segment begins with a FROM_HOST barrier. This barrier also makes earlier segments'
    writes visible, because waiting for a segment orders only execution. A segment that writes host memory
    ends with a TO_HOST barrier. A barrier waits for copies only if a copy was recorded since the previous
    barrier. A barrier delays copies only if a copy follows in the segment.
    """
    commands: list[Command] = []
    marks = exchanges(recording)
    for i, segment in enumerate(recording.segments()):
        if i:
            commands.append(marks[i - 1])
        commands.append(Barrier(Scope.FROM_HOST))
        reads: list[Range] = []
        writes: list[tuple[Range, Access]] = []
        wrote_host = copied = False
        last_copy = max((at for at, c in enumerate(segment) if isinstance(c, Copy)), default=-1)
        for at, command in enumerate(segment):
            if isinstance(command, Dispatch | Copy):
                conflict = (
                    any(r.overlaps(w) for r in command.reads for w, _ in writes)
                    or any(
                        own.overlaps(w) and not apart(command, writer)
                        for own in command.writes
                        for w, writer in writes
                    )
                    or any(w.overlaps(r) for w in command.writes for r in reads)
                )
                if conflict:
                    commands.append(Barrier(Scope.DEVICE, copied, at <= last_copy))
                    reads, writes, copied = [], [], False
                reads += command.reads
                writes += [(w, command) for w in command.writes]
                wrote_host |= _is_host(command.writes)
                copied |= isinstance(command, Copy)
            commands.append(command)
        if wrote_host:
            commands.append(Barrier(Scope.TO_HOST))
    return Recording(recording.name, commands)


def push_constants(dispatch: Dispatch, heads: Sequence[int]) -> bytes:
    """Return the push constants: `heads`, each arg's word offset or address, and the named push constants."""
    words = struct.pack(f"{len(heads)}{'Q' if dispatch.addressed else 'I'}", *heads)
    for _, value in dispatch.push:
        words += struct.pack("f", value) if isinstance(value, float) else struct.pack("I", value & 0xFFFFFFFF)
    return words


def submissions(segment: Iterable[Command]) -> list[list[Command]]:
    parts: list[list[Command]] = [[]]
    for command in segment:
        if isinstance(command, Cut):
            parts.append([])
        else:
            parts[-1].append(command)
    return parts


def exchanges(recording: Recording) -> list[Exchange]:
    return [c for c in recording.commands if isinstance(c, Exchange)]
