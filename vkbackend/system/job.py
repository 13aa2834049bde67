"""Job objects of Windows: limits of a process, and the end of all processes that it starts."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import ctypes
    import subprocess
    import weakref
    from ctypes import wintypes
    from typing import Any

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateJobObjectW.restype = wintypes.HANDLE
    _kernel.CreateJobObjectW.argtypes = ctypes.c_void_p, wintypes.LPCWSTR
    _kernel.AssignProcessToJobObject.argtypes = wintypes.HANDLE, wintypes.HANDLE
    _kernel.SetInformationJobObject.argtypes = wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD
    _kernel.CloseHandle.argtypes = (wintypes.HANDLE,)
    _EXTENDED = 9  # JobObjectExtendedLimitInformation
    _PROCESS_TIME, _ONE_PROCESS, _PROCESS_MEMORY, _DIE_ON_ERROR, _KILL_ON_CLOSE = (
        0x2,
        0x8,
        0x100,
        0x400,
        0x2000,
    )

    class _Limits(ctypes.Structure):
        """JOBOBJECT_EXTENDED_LIMIT_INFORMATION"""

        _fields_ = [
            ("process_time", ctypes.c_int64),  # in 100 ns, as job_time
            ("job_time", ctypes.c_int64),
            ("flags", wintypes.DWORD),
            ("least_working_set", ctypes.c_size_t),
            ("most_working_set", ctypes.c_size_t),
            ("processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("priority", wintypes.DWORD),
            ("scheduling", wintypes.DWORD),
            ("transfers", ctypes.c_uint64 * 6),
            ("process_memory", ctypes.c_size_t),
            ("job_memory", ctypes.c_size_t),
            ("peak_process_memory", ctypes.c_size_t),
            ("peak_job_memory", ctypes.c_size_t),
        ]

    class Job:
        """A job with one process that was just started. All its processes end with the job, and the job ends
        with this program. If `memory` is given, the process may commit this many bytes and may not start
        processes."""

        def __init__(self, process: subprocess.Popen[Any], memory: int | None = None) -> None:
            self._limits = _Limits(flags=_KILL_ON_CLOSE)
            if memory is not None:
                self._limits.flags |= _ONE_PROCESS | _PROCESS_MEMORY | _DIE_ON_ERROR
                self._limits.processes, self._limits.process_memory = 1, memory
            job = _kernel.CreateJobObjectW(None, None)
            if not job:
                raise ctypes.WinError(ctypes.get_last_error())
            self.close = weakref.finalize(self, _kernel.CloseHandle, job)
            self._job = job
            self._set()
            if not _kernel.AssignProcessToJobObject(job, int(process._handle)):  # type: ignore[attr-defined]
                raise ctypes.WinError(ctypes.get_last_error())

        def limit_cpu(self, seconds: float) -> None:
            """Limit the CPU time of the process, from its start. The system ends it with code 1816."""
            self._limits.flags |= _PROCESS_TIME
            self._limits.process_time = int(seconds * 1e7)
            self._set()

        def _set(self) -> None:
            limits = ctypes.byref(self._limits)
            if not _kernel.SetInformationJobObject(self._job, _EXTENDED, limits, ctypes.sizeof(_Limits)):
                raise ctypes.WinError(ctypes.get_last_error())
