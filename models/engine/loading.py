"""What loading tells, again and again while it takes long."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Told:
    """Progress of loading, told again while devices compile: whoever waits with a deadline hears of it."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress, self._last = progress, (0, 0)
        self._lock = Lock()  # devices compile side by side

    def tell(self, done: int, total: int) -> None:
        self._last = done, total
        if self._progress:
            self._progress(done, total)

    def again(self) -> None:
        with self._lock:
            self.tell(*self._last)
