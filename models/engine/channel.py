"""Between the callers of an engine and its threads: requests go in, events come out to who asked.

A signal (Ctrl-C) raises in the main thread between any two bytecodes. So what a caller changes here it
changes in one step of C code: it puts a letter into the inbox, or drops the queue that it reads its events
from. Everything else belongs to the engine's threads, in which no signal raises.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias
from weakref import ref

from vkbackend.models.engine.messages import Cancel, Close, EngineInfo, ErrorData, Event, Request

END_SLICE_S = 0.05  # an interrupt can lose the news of an end, which is then seen this much later

Mail: TypeAlias = SimpleQueue[Event | None]  # None: look what has happened to the engine


@dataclass(frozen=True, slots=True)
class Letter:
    """A request and where its events go. An `eager` caller reads on until the last of them; another one says
    `Next` each time."""

    id: int
    request: Request
    mail: Mail
    eager: bool


@dataclass(frozen=True, slots=True)
class Next:
    """The caller of request `id` waits for its next event."""

    id: int


class Reader(ref[Mail]):
    """Who reads the events of request `id`; it comes into the inbox when nobody can read them any more."""

    __slots__ = ("id",)
    id: int


# What comes into the inbox. A dead reference that is no Reader is that of the owner of the engine.
Word: TypeAlias = Letter | Next | Close | ref[Any]


class Abandoned(BaseException):
    """Raised in the engine's thread where nobody waits for the loading any more."""


class Channel:
    """Callers touch `inbox` and their mail; what they read otherwise changes once: `failed`, `ended`."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Word] = SimpleQueue()
        # While it loads: bytes (done, in all), then what was loaded, or what went wrong.
        self.news: SimpleQueue[tuple[int, int] | EngineInfo | BaseException | None] = SimpleQueue()
        self.readers: dict[int, Reader] = {}  # of the requests that are not answered to the end
        self.engine: object = None  # while it works
        self.thread: int | None = None  # the one that lets it work, once it has begun
        self.closing = False  # the engine's threads have read that it shall end
        self.failed: ErrorData | None = None
        self.ended = False  # everything is released
        self._awaited: set[int] = set()  # requests whose callers wait
        self._eager: set[int] = set()
        self._ends: SimpleQueue[None] = SimpleQueue()

    # ---- the engine's threads ----

    def tell(self, done: int, total: int) -> None:
        """Bytes loaded; raises Abandoned where nobody waits for them."""
        if not self.inbox.empty():  # nothing but an end can be there yet
            raise Abandoned
        self.news.put((done, total))

    def sort(self, word: Word) -> Request | None:
        """Note who asks or waits; returns what the engine must hear of it."""
        if isinstance(word, Letter):
            reader = Reader(word.mail, self.inbox.put)
            reader.id = word.id
            self.readers[word.id] = reader
            if word.eager:
                self._eager.add(word.id)
            return word.request
        if isinstance(word, Next):
            if word.id in self.readers:
                self._awaited.add(word.id)
            return None
        if isinstance(word, Reader):
            return Cancel(word.id) if self._forget(word.id) else None
        self.closing = True
        return Close()

    def is_awaited(self) -> bool:
        """Whether a caller waits for an event."""
        return bool(self._awaited or self._eager)

    def deliver(self, events: Sequence[Event]) -> None:
        """To those who wait last: one that wakes up finds what came for its other requests."""
        for event in sorted(events, key=lambda event: event.id in self._awaited):
            reader = self.readers.get(event.id)
            self._awaited.discard(event.id)
            if event.done:
                self._forget(event.id)
            if reader is not None and (mail := reader()) is not None:
                mail.put(event)

    def _forget(self, id_: int) -> bool:
        self._awaited.discard(id_)
        self._eager.discard(id_)
        return self.readers.pop(id_, None) is not None

    def end(self) -> None:
        """Nothing is left of the engine: whoever waits hears so."""
        self.ended = True
        self.news.put(None)
        self._ends.put(None)
        for reader in list(self.readers.values()):
            if (mail := reader()) is not None:
                mail.put(None)
        with suppress(Empty):
            while True:
                if isinstance(letter := self.inbox.get_nowait(), Letter):
                    letter.mail.put(None)

    # ---- callers ----

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether the engine ended within the time."""
        deadline = time.monotonic() + timeout_s
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._ends.get(timeout=min(left, END_SLICE_S))
        return self.ended
