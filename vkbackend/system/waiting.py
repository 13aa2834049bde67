"""Waiting for another thread or process."""

from __future__ import annotations

import os
import selectors
import sys
import time
from multiprocessing import connection
from typing import Any, Protocol


class Conn(Protocol):
    """The methods of multiprocessing's connections, which have another type on each system."""

    def send(self, obj: Any, /) -> None: ...

    def recv(self) -> Any: ...

    def poll(self, timeout: float | None = 0.0, /) -> bool: ...

    def close(self) -> None: ...


if sys.platform == "win32":

    class Waiter:
        """Waits until a connection of multiprocessing can be read."""

        def __init__(self, conn: Any) -> None:
            self._conn = conn

        def wait(self, seconds: float) -> bool:
            return bool(connection.wait([self._conn], seconds))

        def close(self) -> None:
            pass

    def give_way() -> None:
        """Let another thread run."""
        time.sleep(0)

else:

    class Waiter:
        """Waits until a connection of multiprocessing can be read. `connection.wait` would create a selector
        per call."""

        def __init__(self, conn: Any) -> None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(conn, selectors.EVENT_READ)

        def wait(self, seconds: float) -> bool:
            return bool(self._selector.select(seconds))

        def close(self) -> None:
            self._selector.close()

    give_way = os.sched_yield
