"""The memory of the machine, and the limit of this process's address space."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROOT = Path("/")

if sys.platform == "win32":

    class _Status(ctypes.Structure):
        """MEMORYSTATUSEX"""

        _fields_ = [
            ("size", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        ]

    def _status() -> _Status | None:
        status = _Status(ctypes.sizeof(_Status))
        ask = ctypes.WinDLL("kernel32").GlobalMemoryStatusEx
        return status if ask(ctypes.byref(status)) else None

    def available_nbytes(root: Path = ROOT) -> int | None:
        """Return the number of bytes that are available without swapping, or None if unknown."""
        return int(status.available) if (status := _status()) else None

    def total_nbytes(root: Path = ROOT) -> int | None:
        return int(status.total) if (status := _status()) else None

    def address_space_nbytes(root: Path = ROOT) -> int | None:
        return None

else:
    import resource

    def available_nbytes(root: Path = ROOT) -> int | None:
        """Return the number of bytes that are available without swapping, or None if unknown. `root` contains
        proc."""
        kib = field_of(root / "proc/meminfo", "MemAvailable:")
        return None if kib is None else 1024 * kib

    def total_nbytes(root: Path = ROOT) -> int | None:
        """Return the number of bytes of the machine's memory, or None if unknown."""
        kib = field_of(root / "proc/meminfo", "MemTotal:")
        return None if kib is None else 1024 * kib

    def address_space_nbytes(root: Path = ROOT) -> int | None:
        """Return the bytes left of the limit of the address space (ulimit -v), or None without a limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        return max(0, soft - 1024 * (field_of(root / "proc/self/status", "VmSize:") or 0))


def field_of(path: Path, name: str) -> int | None:
    """Return the number after `name` at the beginning of a line, or None if it is missing."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name and words[1].isdecimal():
                return int(words[1])
    except OSError:
        pass
    return None
