"""Limit uvicorn's connections: their number, the size and time of their headers, and their unread data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vkbackend.tools.server.limits import Limits

MAX_BODIES = 4  # A body that exceeds the maximum size by more than this factor ends the connection.
ANSWERS = {
    408: b"HTTP/1.1 408 Request Timeout\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\n",
}


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    class Connection(BoundedConnection):
        bounds = limits

    return Connection


class BoundedConnection(HttpToolsProtocol):
    bounds = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_headers, self._n_header_bytes = True, 0
        self._n_body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # for headers or body
        self._drain: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._end(503)
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    # ---- headers ----

    def _await_headers(self) -> None:
        if self._timer is None:
            self._set_timer(self.bounds.header_s, partial(self._end, 408))

    def _set_timer(self, after_s: float | None, call: Callable[[], object] | None) -> None:
        """None removes the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if after_s is None or call is None else self.loop.call_later(after_s, call)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._await_headers()
            # asyncio delivers up to 256 KiB, which uvicorn parses before the limit is checked.
            self._n_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._n_header_bytes > self.bounds.header_nbytes:
            self._end(431)

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        n_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._n_header_bytes = self._n_body_bytes = 0
        self._set_timer(2 * self.bounds.body_s, self.transport.abort)
        if n_bytes > self.bounds.header_nbytes:
            self._end(431)
            raise httptools.HttpParserError("too many bytes of headers")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Accept the body of a refused request, because clients read the answer only after the body is
        sent."""
        self._n_body_bytes += len(body)
        if self._n_body_bytes > MAX_BODIES * self.bounds.body_nbytes:
            self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._set_timer(None, None)
        super().on_message_complete()
        self._in_headers = True  # of the next request

    # ---- writing ----

    def pause_writing(self) -> None:
        """asyncio calls this when 64 KiB wait for the client. The client then has `drain_s` seconds to read
        them."""
        super().pause_writing()
        if self._drain is None:
            self._drain = self.loop.call_later(self.bounds.drain_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _end(self, status: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(ANSWERS[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._drain):
            if timer is not None:
                timer.cancel()
        self._timer = self._drain = None
