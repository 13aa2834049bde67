"""The progress of loading, repeated while nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Told:
    """Reports the progress of loading, and repeats it while devices compile: who waits with a deadline then
    knows that the engine is alive."""

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
