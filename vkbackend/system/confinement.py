"""Lets a parent watch the CPU time and memory of a child process, in addition to the system's limits.

Linux enforces the limits that the child sets itself (own_limits.py), and Windows the limits of the child's
job. A system may ignore such limits, as Wine does. So the parent also compares the child's use with the
limits, and ends the child.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

SLACK_S = 1.5  # RLIMIT_CPU counts whole seconds, and its signal should arrive before the parent acts.


@dataclass(frozen=True, slots=True)
class Use:
    """CPU seconds since the start of a process, and bytes of its memory."""

    cpu_s: float
    nbytes: int


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    from vkbackend.system.job import Job

    class _Memory(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS"""

        _fields_ = [
            ("size", wintypes.DWORD),
            ("faults", wintypes.DWORD),
            ("others", ctypes.c_size_t * 6),
            ("committed", ctypes.c_size_t),
            ("most_committed", ctypes.c_size_t),
        ]

    class _Thread(ctypes.Structure):
        """THREADENTRY32"""

        _fields_ = [
            ("size", wintypes.DWORD),
            ("usage", wintypes.DWORD),
            ("thread", wintypes.DWORD),
            ("process", wintypes.DWORD),
            ("others", wintypes.DWORD * 3),
        ]

    OVER_CPU = 1816  # ERROR_NOT_ENOUGH_QUOTA
    _ALL_THREADS, _QUERY = 4, 0x40  # TH32CS_SNAPTHREAD, THREAD_QUERY_INFORMATION
    _kernel = ctypes.WinDLL("kernel32")
    _kernel.K32GetProcessMemoryInfo.argtypes = wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD
    _kernel.CreateToolhelp32Snapshot.restype = _kernel.OpenThread.restype = wintypes.HANDLE
    _kernel.Thread32First.argtypes = _kernel.Thread32Next.argtypes = wintypes.HANDLE, ctypes.c_void_p
    _kernel.GetThreadTimes.argtypes = wintypes.HANDLE, *[ctypes.POINTER(wintypes.FILETIME)] * 4
    _kernel.CloseHandle.argtypes = (wintypes.HANDLE,)

    def use_of(process: subprocess.Popen[Any]) -> Use | None:
        """Return None if the process has ended. Threads that have ended do not count."""
        memory = _Memory(size=ctypes.sizeof(_Memory))
        handle = int(process._handle)  # type: ignore[attr-defined]
        if not _kernel.K32GetProcessMemoryInfo(handle, ctypes.byref(memory), memory.size):
            return None
        # GetProcessTimes of Wine 10 returns the caller's times for other processes.
        return Use(sum(map(_thread_s, _threads_of(process.pid))), memory.committed)

    def _threads_of(pid: int) -> list[int]:
        threads: list[int] = []
        snapshot = _kernel.CreateToolhelp32Snapshot(_ALL_THREADS, 0)
        entry = _Thread(size=ctypes.sizeof(_Thread))
        more = _kernel.Thread32First(snapshot, ctypes.byref(entry))
        while more:
            if entry.process == pid:
                threads.append(entry.thread)
            more = _kernel.Thread32Next(snapshot, ctypes.byref(entry))
        _kernel.CloseHandle(snapshot)
        return threads

    def _thread_s(thread: int) -> float:
        """Return a thread's seconds of CPU time, 0 if it has ended."""
        if not (handle := _kernel.OpenThread(_QUERY, False, thread)):
            return 0.0
        times = [wintypes.FILETIME() for _ in range(4)]
        _kernel.GetThreadTimes(handle, *map(ctypes.byref, times))
        _kernel.CloseHandle(handle)
        return sum((time.dwHighDateTime << 32 | time.dwLowDateTime) * 1e-7 for time in times[2:])

else:
    import os
    import signal

    OVER_CPU = -signal.SIGXCPU  # The exit code in Popen of a process that reached its limit of CPU time.
    _TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    def use_of(process: subprocess.Popen[Any]) -> Use | None:
        """Return None if the process has ended."""
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return Use((int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE)


class Confinement:
    """Limits of one child process, `memory` in bytes. Raises OSError."""

    def __init__(self, process: subprocess.Popen[Any], memory: int) -> None:
        self._process, self._memory = process, memory
        self._most_cpu_s: float | None = None
        if sys.platform == "win32":
            self._job = Job(process, memory)

    def begin(self) -> None:
        """Begin a request. The first call of `excess` begins to count its CPU time."""
        self._most_cpu_s = None

    def excess(self, cpu_s: float) -> str:
        """Return "cpu" if the child has used more than `cpu_s` seconds in this request, "memory" if it uses
        more than its memory, and otherwise ""."""
        if (use := use_of(self._process)) is None:
            return ""
        if self._most_cpu_s is None:
            self._most_cpu_s = use.cpu_s + cpu_s + SLACK_S
            if sys.platform == "win32":
                self._job.limit_cpu(self._most_cpu_s)
        if use.nbytes > self._memory:
            return "memory"
        return "cpu" if use.cpu_s > self._most_cpu_s else ""
