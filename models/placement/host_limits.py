"""The memory that the system grants this process for pinned host memory, before anything is allocated.

A driver may allocate more than the system can pin. Then the driver fails when a step is submitted, or the
system kills the process. So the bytes are compared with these limits before any memory is pinned. GPU drivers
pin memory without counting it towards RLIMIT_MEMLOCK, which is 8 MiB on most systems, so RLIMIT_MEMLOCK is
not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vkbackend.system import memory

UNLIMITED = 1 << 60  # version 1 of cgroups reports a number near 2^63


@dataclass(frozen=True, slots=True)
class HostLimit:
    """A limit of which `nbytes` are left. `name` completes "host memory (...)"."""

    name: str
    nbytes: int


def host_limits(root: Path = Path("/")) -> list[HostLimit]:
    """Return the limits that are known: memory available without swapping, the limits of control groups, and
    the limit of the address space. `root` contains proc and sys."""
    limits = []
    if (available := memory.available_nbytes(root)) is not None:
        limits.append(HostLimit("available", available))
    limits += [HostLimit("limit of the control group", n) for n in _groups(root)]
    if (left := memory.address_space_nbytes(root)) is not None:
        limits.append(HostLimit("limit of the address space, ulimit -v", left))
    return limits


def least_host_limit() -> HostLimit | None:
    return min(host_limits(), key=lambda limit: limit.nbytes, default=None)


def host_free_nbytes() -> int | None:
    """Return the number of bytes of host memory that this process can pin, or None if unknown."""
    return limit.nbytes if (limit := least_host_limit()) else None


def _groups(root: Path) -> Iterator[int]:
    """Yield the bytes left in the process's memory group and in each group that contains it. Pages of files
    can be dropped, so they do not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _left(root / "sys/fs/cgroup/memory", path, *files)


def _left(mount: Path, path: str, limit: str, usage: str, dropped: str) -> Iterator[int]:
    folder = mount / path.strip("/")
    if not folder.is_dir():  # in a container the path is often the path on the host system
        folder = mount
    for group in (folder, *folder.parents):
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None and most < UNLIMITED:
            yield max(0, most - used + (memory.field_of(group / "memory.stat", dropped) or 0))
        if group == mount:
            return


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" is no limit
