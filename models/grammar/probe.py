"""Compiles a grammar in a process with limits of time and memory (probe_worker.py), before the compiler
compiles it. Any client may send a grammar, and some grammars take minutes and gigabytes.
"""

from __future__ import annotations

import threading

from vkbackend import forks
from vkbackend.errors import VkbackendError
from vkbackend.models.processes.child import Child, Ended
from vkbackend.models.processes.frames import ANSWERED, ASKED, HEAD
from vkbackend.models.processes.memory_limits import GRAMMAR_MEMORY

COMPILE_S = 5.0  # Seconds per grammar. Schemas of tools take milliseconds.


class Probe:
    """Tests grammars in a process, for one caller at a time. If the process has ended, a new one is
    started."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._closed = False
        forks.own(self)

    def passes(self, lark: str) -> bool:
        """Return whether a grammar is within the limits. Raises VkbackendError after `close`, or if no
        process can be started."""
        body = lark.encode()
        with self._lock:
            child = self._started()
            try:
                kind, _, _ = child.exchange((HEAD.pack(len(body), 0, ASKED), body), COMPILE_S, ANSWERED)
                if kind == ANSWERED:
                    return True
                child.kill()
            except (TimeoutError, Ended):
                pass
            self._child = None
            self._check_open()
            return False

    def _started(self) -> Child:
        if self._child is None or not self._child.idle():
            self._check_open()
            self._child = Child("vkbackend.models.grammar.probe_worker", "trying grammars", GRAMMAR_MEMORY)
            self._check_open()
        return self._child

    def close(self) -> None:
        """End the process, even while it compiles. A running call of `passes` then raises VkbackendError."""
        self._closed = True
        if (child := self._child) is not None:
            child.stop()

    def _check_open(self) -> None:
        if self._closed:
            if self._child is not None:
                self._child.kill()
            raise VkbackendError("no grammar is compiled any more: the model is being closed")

    def disown(self) -> None:
        self._child, self._closed = None, True
