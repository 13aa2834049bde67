"""Serve with few file descriptors.

An open connection needs a descriptor, and so do the engine's process and its files. The number of connections
is limited, so descriptors remain for the engine and its files. If the system has no free descriptor, asyncio
tries to accept again after a second, and the log gets one line a minute.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any

from vkbackend.system.open_files import free_descriptors

SPARE = 32  # Descriptors for the pipes of a reopened engine, a chat template's process, states, and blocks.
LEAST = 4
NONE_LEFT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
QUIET_S = 60.0

log = logging.getLogger("vkbackend.serve")


def connections_of(most: int) -> int:
    """Return how many connections RLIMIT_NOFILE allows, at most `most`, and log a lower number."""
    if (left := free_descriptors()) is None:
        return most
    free, limit = left
    n = min(most, max(LEAST, free - SPARE))
    if n < most:
        log.warning(
            "at most %d connections, because the process may open %d files (ulimit -n); %d would need %d",
            n, limit, most, limit + most - n,
        )  # fmt: skip
    return n


class QuietAccepts:
    """The event loop's exception handler. It logs failed accepts once a minute."""

    def __init__(self) -> None:
        self._next = -QUIET_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or getattr(error, "errno", None) not in NONE_LEFT:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET_S
            log.warning("new connections wait, because a resource is used up: %s (ulimit -n)", error)
