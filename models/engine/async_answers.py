"""Delivers answers to coroutines, as answers.py does to threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from weakref import WeakKeyDictionary, ref

from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.channel import Letter, Next
from vkbackend.models.engine.messages import Answer, Request, is_last


class LoopWaker:
    """Wakes all coroutines of an event loop that received answers in a step, with one system call. Each call
    makes the loop's thread compete with the engine's thread for the interpreter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self.waiters: deque[asyncio.Future[None]] = deque()

    def wake(self) -> None:
        if self.waiters and (loop := self._loop()) is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = WeakKeyDictionary()


class AsyncMail:
    """A queue from the engine's thread to one coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._items = loop, deque[Answer | None]()
        self._waker = _wakers.setdefault(loop, LoopWaker(loop))
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: Answer | None) -> LoopWaker | None:
        self._items.append(answer)
        if (waiter := self._waiter) is None:
            return None
        self._waiter = None
        self._waker.waiters.append(waiter)
        return self._waker

    def qsize(self) -> int:
        return len(self._items)

    def take(self) -> Answer | None:
        return self._items.popleft() if self._items else None

    def arrival(self) -> asyncio.Future[None] | None:
        """Return a future for the next answer, or None if an answer has arrived."""
        self._waiter = waiter = self._loop.create_future()
        if not self._items:
            return waiter
        self._waiter = None
        return None


class AsyncAnswers(AsyncIterator[Answer]):
    """`Answers` for asyncio. The request is cancelled when the mail is garbage-collected."""

    def __init__(self, mailbox: Mailbox, make: Callable[[int], Request], *, eager: bool) -> None:
        self._mailbox, self._eager, self._ended = mailbox, eager, False
        mail = AsyncMail(asyncio.get_running_loop())
        self._mail: AsyncMail | None = mail
        self._id, request = mailbox.make(make)
        mailbox.channel.inbox.put(Letter(self._id, request, mail, eager))

    def __aiter__(self) -> AsyncIterator[Answer]:
        return self

    async def __anext__(self) -> Answer:
        """`__anext__` is a single coroutine for speed."""
        if self._ended:
            self.close()
            raise StopAsyncIteration
        mail, channel = self._mail, self._mailbox.channel
        assert mail is not None, "read on after close()"
        self._mailbox.check_open()
        while (answer := mail.take()) is None:
            self._mailbox.check_open()
            if not self._eager or self._id in channel.paused:
                channel.inbox.put(Next(self._id))
            if (arrival := mail.arrival()) is not None:
                await arrival
        if not isinstance(answer, int):
            try:
                self._ended = is_last(answer)
            except BaseException:
                self.close()
                raise
        return answer

    def close(self) -> None:
        self._mail = None
