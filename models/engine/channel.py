"""Passes requests from callers to the engine's threads, and passes the answers back.

Ctrl-C may raise KeyboardInterrupt between any two bytecodes of the main thread. Each change by a caller is
therefore a single call of C code: it puts a message into the inbox, or drops the caller's queue.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias
from weakref import ref

from vkbackend.models.engine.messages import (
    Answer,
    Cancel,
    Close,
    EngineInfo,
    ErrorData,
    News,
    Pause,
    Request,
    Resume,
)

# If an interrupt drops the engine's last message, callers notice the engine's end after this time.
END_SLICE_S = 0.05


class Waker(Protocol):
    def wake(self) -> None: ...


class Mail(Protocol):
    """Receives the answers to a request, or None if the engine ends."""

    def put(self, answer: Answer | None, /) -> Waker | None:
        """Add an answer. Return a waker to call after all answers of the step."""

    def qsize(self) -> int: ...


# A request with this many unread answers pauses until its caller asks for the next answer.
MOST_UNREAD = 1024


@dataclass(frozen=True, slots=True)
class Letter:
    """Unless a request is `eager`, the caller sends a `Next` for each answer."""

    id: int
    request: Request
    mail: Mail
    eager: bool


@dataclass(frozen=True, slots=True)
class Next:
    id: int


class Reader(ref[Mail]):
    """A weak reference to a request's mail. When the mail is garbage-collected, Python puts the reference
    into the inbox."""

    __slots__ = ("id",)
    id: int


# A `ref` that is not a `Reader` refers to the `Mailbox`.
Word: TypeAlias = Letter | Next | Pause | Close | ref[Any]


class Abandoned(BaseException):
    """Raised when the caller closes the channel while the model loads."""


class Channel:
    """A caller writes only to `inbox` and to its own mail."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Word] = SimpleQueue()
        # While the model loads, `news` gets (bytes loaded, total bytes), then the info or the error.
        self.news: SimpleQueue[tuple[int, int] | EngineInfo | BaseException | None] = SimpleQueue()
        self.readers: dict[int, Reader] = {}
        self.engine: object = None
        self.thread: int | None = None
        self.closing = False
        self.failed: ErrorData | None = None
        self.ended = False
        self.paused: set[int] = set()
        self._awaited: set[int] = set()
        self._eager: set[int] = set()
        self._ends: SimpleQueue[None] = SimpleQueue()

    def tell(self, done: int, total: int) -> None:
        """Raises Abandoned if the caller has closed the channel."""
        if not self.inbox.empty():  # Any message ends loading.
            raise Abandoned
        self.news.put((done, total))

    def sort(self, word: Word) -> Request | None:
        """Return the request that the engine must process, or None."""
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
                if word.id in self.paused:
                    self.paused.discard(word.id)
                    return Resume(word.id)
            return None
        if isinstance(word, Pause):
            return word if word.id in self.paused else None
        if isinstance(word, Reader):
            return Cancel(word.id) if self._forget(word.id) else None
        self.closing = True
        return Close()

    def is_awaited(self) -> bool:
        return bool(self._awaited or self._eager)

    def deliver(self, news: News) -> None:
        """Deliver answers. Wake waiting callers only after all their answers are delivered."""
        awaited: list[tuple[int, Answer]] = []
        wakers: set[Waker] = set()
        for id_, answer in zip(news.ids, news.answers, strict=True):
            if id_ in self._awaited:
                awaited.append((id_, answer))
            elif waker := self._put(id_, answer):
                wakers.add(waker)
        for id_, answer in awaited:
            self._awaited.discard(id_)
            if waker := self._put(id_, answer):
                wakers.add(waker)
        for waker in wakers:
            waker.wake()

    def _put(self, id_: int, answer: Answer) -> Waker | None:
        reader = self.readers.get(id_)
        waker: Waker | None = None
        if not isinstance(answer, int) and answer.done:
            self._forget(id_)
        if reader is not None and (mail := reader()) is not None:
            waker = mail.put(answer)
            if mail.qsize() >= MOST_UNREAD and id_ in self.readers and id_ not in self.paused:
                self.paused.add(id_)
                self.inbox.put(Pause(id_))
        return waker

    def _forget(self, id_: int) -> bool:
        self._awaited.discard(id_)
        self._eager.discard(id_)
        self.paused.discard(id_)
        return self.readers.pop(id_, None) is not None

    def end(self) -> None:
        self.ended = True
        self.news.put(None)
        self._ends.put(None)
        for reader in list(self.readers.values()):
            if (mail := reader()) is not None:
                _tell_end(mail)
        with suppress(Empty):
            while True:
                if isinstance(letter := self.inbox.get_nowait(), Letter):
                    _tell_end(letter.mail)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._ends.get(timeout=min(left, END_SLICE_S))
        return self.ended


def _tell_end(mail: Mail) -> None:
    if waker := mail.put(None):
        waker.wake()
