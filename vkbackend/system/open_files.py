"""The number of files that this process may still open."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":

    def free_descriptors() -> tuple[int, int] | None:
        """Windows has no small limit for sockets and handles."""
        return None

else:
    import resource

    def free_descriptors() -> tuple[int, int] | None:
        """Return how many more files this process may open, and its limit, or None without a limit."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        return limit - len(os.listdir("/proc/self/fd")), limit
