"""Sorts a segment's commands by dependency depth, so that independent commands can run concurrently.

In the recorded order (q, RoPE of q, k, RoPE of k), nearly every command needs a barrier. After sorting, the
products q, k and v share one barrier.
"""

from __future__ import annotations

from vkbackend.recording import Command, Copy, Cut, Dispatch, Range, Recording, exchanges


def by_depth(recording: Recording) -> Recording:
    """Sort each segment by depth. The sort is stable. A command's depth is 1 + the largest depth of the
    commands that it must wait for, or 0 without such commands."""
    commands: list[Command] = []
    marks = exchanges(recording)
    for i, segment in enumerate(recording.segments()):
        if i:
            commands.append(marks[i - 1])
        commands += _sorted(segment)
    return Recording(recording.name, commands)


def _sorted(segment: list[Command]) -> list[Command]:
    reads: dict[object, list[tuple[Range, int, int]]] = {}
    writes: dict[object, list[tuple[Range, int, int]]] = {}
    depths: list[int] = []
    for command in segment:
        assert isinstance(command, Dispatch | Copy) and not isinstance(command, Cut), command
        own_reads, own_writes = command.reads, command.writes
        depth, part = 0, command.apart if isinstance(command, Dispatch) else 0
        for table, ranges in ((writes, own_reads), (writes, own_writes), (reads, own_writes)):
            for buffer, begin, end in ranges:
                for other, d, of in table.get(buffer, ()):
                    if d >= depth and begin < other.end and other.begin < end:
                        if not (part and part == of and ranges is own_writes and table is writes):
                            depth = d + 1
        for table, ranges in ((reads, own_reads), (writes, own_writes)):
            for access in ranges:
                table.setdefault(access.buffer, []).append((access, depth, part))
        depths.append(depth)
    return [command for _, command in sorted(zip(depths, segment, strict=True), key=lambda item: item[0])]
