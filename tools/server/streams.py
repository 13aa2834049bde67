"""Send answers as one JSON document or as server-sent events.

A disconnect cancels the generation. An error before the first event sets the status, and a later error is an
event. Comments keep proxies connected between events.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Send

from vkbackend.tools.server.failures import ClientGone

Header = tuple[bytes, bytes]

JSON = (b"content-type", b"application/json")
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # disables nginx's buffering
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def event(value: Any, name: str | None = None) -> bytes:
    """Encode an event in one data line, because encoded JSON has no line feeds."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, encode(value))


async def reply(
    send: Send, status: int, body: bytes, headers: list[Header], content_type: Header = JSON
) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [content_type, length, *headers]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Raise ClientGone in the `with` block when the client disconnects. The request's body must already be
    read."""
    task, gone, left = asyncio.current_task(), asyncio.ensure_future(receive()), False
    assert task is not None

    def leave(_: object) -> None:
        nonlocal left
        left = True
        task.cancel()

    gone.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()


class EventStream:
    """Sends encoded events. `fail` encodes an error as the last event."""

    def __init__(
        self, begin: Send, send: Send, ping_s: float, fail: Callable[[BaseException], bytes]
    ) -> None:
        self._send_head, self._send, self._ping_s, self._fail = begin, send, ping_s, fail
        self.has_begun = False
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    async def run(self, events: AsyncGenerator[bytes, None], receive: Receive) -> BaseException | None:
        """Send all events. Raise errors before the first event. Send later errors to the client and return
        them."""
        if math.isfinite(self._ping_s):
            self._timer = self._loop.call_later(self._ping_s, self._look)
        try:
            async with while_connected(receive):
                # Events are sent in a new task. In the request's task, each event would resume all coroutines
                # of the routing.
                failed = await asyncio.create_task(self._send_all(events))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._ping is not None:
                self._ping.cancel()
        if not self.has_begun:
            await self._begin()
        last = self._fail(failed) if failed else b""
        await self._send({"type": "http.response.body", "body": last})
        return failed

    async def _send_all(self, events: AsyncGenerator[bytes, None]) -> BaseException | None:
        async with aclosing(events):
            try:
                async for data in events:
                    if not self.has_begun:
                        await self._begin()
                    self._last_s = self._loop.time()
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not self.has_begun:
                    raise
                return error
        return None

    async def _begin(self) -> None:
        self.has_begun = True
        await self._send_head({"type": "http.response.start", "status": 200, "headers": EVENTS})

    def _look(self) -> None:
        idle_s = self._loop.time() - self._last_s
        if idle_s >= self._ping_s:
            self._last_s, idle_s = self._loop.time(), 0.0
            if self._ping is None or self._ping.done():
                self._ping = self._loop.create_task(self._send_ping())
        self._timer = self._loop.call_later(self._ping_s - idle_s, self._look)

    async def _send_ping(self) -> None:
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": PING, "more_body": True})
