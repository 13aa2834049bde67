"""Starts child processes that the caller's Ctrl-C does not reach, and ends them with all processes that they
started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

if sys.platform == "win32":
    from vkbackend.system.job import Job

    APART: dict[str, Any] = {
        "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    }

    class Tree:
        """A process started with APART, in a job with the processes that it starts."""

        def __init__(self, process: subprocess.Popen[Any]) -> None:
            self._job = Job(process)

        def kill(self) -> None:
            self._job.close()

else:
    APART: dict[str, Any] = {"start_new_session": True}

    class Tree:
        """A process started with APART, and the processes that it starts."""

        def __init__(self, process: subprocess.Popen[Any]) -> None:
            self._pid = process.pid

        def kill(self) -> None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
