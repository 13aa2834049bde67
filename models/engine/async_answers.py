"""The answers to one request for asyncio: as answers.py, but a coroutine waits instead of a thread."""

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
    """Wakes the coroutines of a loop that have mail, those of a step together: to wake one is a system call,
    and this thread then competes with it for the interpreter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self.waiters: deque[asyncio.Future[None]] = deque()

    def wake(self) -> None:
        if self.waiters and (loop := self._loop()) is not None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = WeakKeyDictionary()


class AsyncMail:
    """What the engine's thread puts here one coroutine of the loop gets, in order."""

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

    def empty(self) -> bool:
        return not self._items

    async def get(self) -> Answer | None:
        while not self._items:
            self._waiter = waiter = self._loop.create_future()
            if not self._items:  # else the thread may have come before it saw who waits
                await waiter
        self._waiter = None
        return self._items.popleft()


class AsyncAnswers(AsyncIterator[Answer]):
    """As `Answers`, in the running loop: the request is posted now, and cancelled when nobody can read its
    mail any more."""

    def __init__(self, mailbox: Mailbox, make: Callable[[int], Request], *, eager: bool) -> None:
        self._mailbox, self._eager, self._ended = mailbox, eager, False
        mail = AsyncMail(asyncio.get_running_loop())
        self._mail: AsyncMail | None = mail
        self._id, request = mailbox.make(make)
        mailbox.channel.inbox.put(Letter(self._id, request, mail, eager))

    def __aiter__(self) -> AsyncIterator[Answer]:
        return self

    async def __anext__(self) -> Answer:
        if self._ended:
            self.close()
            raise StopAsyncIteration
        answer = await self._next()
        try:
            self._ended = is_last(answer)
        except BaseException:
            self.close()
            raise
        return answer

    async def _next(self) -> Answer:
        assert self._mail is not None, "read on after close()"
        channel = self._mailbox.channel
        while True:
            self._mailbox.check_open()
            if self._mail.empty() and (not self._eager or self._id in channel.paused):
                channel.inbox.put(Next(self._id))
            if (answer := await self._mail.get()) is not None:
                return answer

    def close(self) -> None:
        self._mail = None
