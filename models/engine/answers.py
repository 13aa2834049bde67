"""One engine, many callers: each reads the answers to its own request, and whoever waits drives the engine
for all of them.

One thread at a time lets the engine work, outside the lock; the others wait for what it brings them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from vkbackend import env
from vkbackend.errors import Timeout, VkbackendError
from vkbackend.models.engine.hosting import ANSWER_MARGIN_S, EngineClient
from vkbackend.models.engine.messages import Cancel, ErrorData, Event, Request


class Mailbox:
    """The letters of an engine, sorted by request."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine: EngineClient | None = engine  # None once it is closed
        self.mail: dict[int, deque[Event]] = {}  # by request: what nobody has read yet
        self._closed = False
        self._failed: ErrorData | None = None
        self._ids = count()
        self._driving = False
        self._news = threading.Condition()

    def ask(self, make: Callable[[int], Request]) -> Answers:
        """Post the request that `make` builds from its id; the answers are iterated once."""
        return Answers(self, next(self._ids), make)

    def open_engine(self) -> EngineClient:
        """The engine; raises what ended it, or that it is closed."""
        engine = self.engine  # another thread may close it between two lines
        if self._closed or engine is None:
            raise VkbackendError("this LLM is closed; open the model again with LLM(path, ...)")
        if self._failed:
            raise self._failed.exception()
        return engine

    def next_event(self, mail: deque[Event]) -> Event:
        """The next event of a request; the engine works until there is one."""
        while True:
            with self._news:
                while self._driving and not mail:
                    self._news.wait()
                if mail:
                    return mail.popleft()
                engine = self.open_engine()
                self._driving = True
            events: list[Event] = []
            try:
                events = engine.poll()
            except VkbackendError as error:
                self._failed = ErrorData.of(error)
            finally:
                with self._news:
                    self._driving = False
                    for event in events:
                        if (unread := self.mail.get(event.id)) is not None:
                            unread.append(event)
                    self._news.notify_all()

    def close(self) -> None:
        """Release the engine; may be called twice. Raises Timeout while another thread is in a step of it."""
        self._closed = True  # from here on nobody starts a step
        deadline = time.monotonic() + env.timeout_s() + ANSWER_MARGIN_S
        with self._news:
            while self._driving and time.monotonic() < deadline:
                self._news.wait(0.1)
            if self._driving:
                raise Timeout("another thread is still in a step of this LLM; close it when that has ended")
            engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


class Answers:
    """The events of one request, which is posted now and cancelled if it is closed before its last event."""

    def __init__(self, mailbox: Mailbox, id_: int, make: Callable[[int], Request]) -> None:
        self._mailbox, self._id = mailbox, id_
        self._mail, self._done = deque[Event](), False
        engine = mailbox.open_engine()
        mailbox.mail[self._id] = self._mail
        try:
            engine.post(make(id_))
        except BaseException:
            del mailbox.mail[self._id]  # nobody will read it
            raise

    def __iter__(self) -> Iterator[Event]:
        try:
            while not self._done:
                event = self._mailbox.next_event(self._mail)
                self._done = event.done
                if event.error:
                    raise event.error.exception()
                yield event
        finally:
            self.close()

    def close(self) -> None:
        """Takes no lock: the garbage collector may finalize a stream inside any step."""
        engine = self._mailbox.engine
        if self._mailbox.mail.pop(self._id, None) is not None and not self._done and engine is not None:
            engine.post(Cancel(self._id))
