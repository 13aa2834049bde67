"""Stops, ends and watches other processes on each system."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KILL = 9  # On Windows, os.kill ends a process with this exit code.
KILLED = KILL if sys.platform == "win32" else -KILL
"""The exit code of a process that `kill` ended, as in Popen."""
END_S = 30.0

if sys.platform == "win32":
    _MAY_STOP, _MAY_WAIT, _STILL_RUNS = 0x800, 0x100000, 0x102
    _kernel: Any = ctypes.WinDLL("kernel32")
    _kernel.OpenProcess.restype = ctypes.c_void_p

    @contextmanager
    def _opened(pid: int, access: int) -> Iterator[ctypes.c_void_p | None]:
        handle = _kernel.OpenProcess(access, False, pid)
        yield ctypes.c_void_p(handle) if handle else None
        if handle:
            _kernel.CloseHandle(ctypes.c_void_p(handle))

    def suspend(pid: int) -> None:
        """Stop all threads of a process."""
        with _opened(pid, _MAY_STOP) as process:
            assert ctypes.WinDLL("ntdll").NtSuspendProcess(process) == 0

    def is_alive(pid: int) -> bool:
        with _opened(pid, _MAY_WAIT) as process:
            return process is not None and _kernel.WaitForSingleObject(process, 0) == _STILL_RUNS

    is_known = is_alive

else:

    def suspend(pid: int) -> None:
        """Stop all threads of a process."""
        os.kill(pid, signal.SIGSTOP)

    def is_alive(pid: int) -> bool:
        """Return whether a process runs. A zombie does not."""
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return status.rpartition(")")[2].split()[0] != "Z"

    def is_known(pid: int) -> bool:
        """Return whether a process runs, or has ended and its parent has not waited for it."""
        return Path(f"/proc/{pid}").exists()


def kill(pid: int) -> None:
    """End a process, and wait until it has ended."""
    os.kill(pid, KILL)
    assert _becomes_false(is_alive, pid)


def process_ends(pid: int) -> bool:
    """Return whether a process ends within 30 s and its parent has waited for it."""
    return _becomes_false(is_known, pid)


def _becomes_false(condition: Callable[[int], bool], pid: int) -> bool:
    deadline = time.monotonic() + END_S
    while condition(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
