"""Limits that a child process sets itself. On Windows, the parent's job object has them (confinement.py)."""

from __future__ import annotations

import math
import signal
import sys

if sys.platform == "win32":

    def restrict(memory: int) -> None:
        pass

    def limit_cpu(seconds: float) -> None:
        pass

else:
    import resource

    def restrict(memory: int) -> None:
        """Allow `memory` bytes of address space and no core file. Also restore the default effect of signals
        that the parent blocks or handles."""
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, memory)

    def limit_cpu(seconds: float) -> None:
        """Limit CPU time from now on. At the limit SIGXCPU ends the process, even inside a long call."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))

    def _limit(resource_id: int, most: int) -> None:
        """Set a limit, unless the system's limit is lower."""
        hard = resource.getrlimit(resource_id)[1]
        resource.setrlimit(resource_id, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
