"""A child process that threads share. The child is started on first use, and again on the next use after it
has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from vkbackend.errors import InvalidArgument, Timeout


class Idle(Protocol):
    def idle(self) -> bool: ...


W = TypeVar("W", bound=Idle)
R = TypeVar("R")


class Shared(Generic[W]):
    """Calls `start` for a child process. `what` names the process in the message of a Timeout."""

    def __init__(self, start: Callable[[], W], what: str) -> None:
        self._start, self._what = start, what
        self._renew()

    def _renew(self) -> None:
        self._worker: W | None = None
        self._lock, self._pid = threading.RLock(), os.getpid()

    def use(self, work: Callable[[W], R], wait_s: float) -> R:
        """Return work(child). Threads call it one at a time. Raises Timeout after waiting for `wait_s`."""
        if self._pid != os.getpid():  # After a fork, the worker and the lock belong to the parent.
            self._renew()
        lock = self._lock
        try:
            if not lock.acquire(timeout=wait_s):
                raise Timeout(f"{self._what} was busy with other requests for {wait_s:.0f} s; try again")
            # The attribute is None during a request, so an interrupt drops the worker and its pending reply.
            worker, self._worker = self._worker, None
            if worker is None or not worker.idle():
                worker = self._start()
            try:
                result = work(worker)
            except InvalidArgument:
                self._worker = worker
                raise
            self._worker = worker
            return result
        finally:
            try:
                lock.release()
            except RuntimeError:
                pass  # The lock is not acquired.
