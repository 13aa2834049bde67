"""The machine's processor: its name, and the cores that this process may use."""

from __future__ import annotations

import os
import sys

if sys.platform == "linux":

    def usable_cores() -> int:
        return len(os.sched_getaffinity(0))

    def name() -> str:
        """Return the processor's name, or "" if unknown."""
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
                line = next((line for line in lines if line.startswith("model name")), "")
        except OSError:
            return ""
        return line.partition(":")[2].strip()

else:

    def usable_cores() -> int:
        return os.cpu_count() or 1

    def name() -> str:
        return os.environ.get("PROCESSOR_IDENTIFIER", "")
