from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import uvicorn

from vkbackend.errors import InvalidArgument
from vkbackend.system.interrupts import END_SIGNALS
from vkbackend.tools.server.app import App
from vkbackend.tools.server.descriptors import QuietAccepts, connections_of
from vkbackend.tools.server.front import Front
from vkbackend.tools.server.protocol import protocol
from vkbackend.tools.server.sockets import BACKLOG

LAST_EVENT_S = 5.0  # The last error events may take this long after `shutdown_s`.
# asyncio accepts this many connections before it calls their protocols, which count and refuse them. If file
# descriptors run out, asyncio of Python 3.11 fails for each of these connections, and schedules another
# attempt for each.
ACCEPTS_AT_ONCE = 1

log = logging.getLogger("vkbackend.serve")


class Server(uvicorn.Server):
    """`failed` is the error of opening the model."""

    def __init__(self, service: Front, *, key_file: str | None, cert_file: str | None) -> None:
        self.service = service
        limits = service.config.limits
        settings = uvicorn.Config(
            App(self.service),
            http=protocol(replace(limits, connections=connections_of(limits.connections))),
            backlog=ACCEPTS_AT_ONCE,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # clients could forge addresses
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=int(limits.shutdown_s + LAST_EVENT_S + 1),
            ssl_keyfile=key_file,
            ssl_certfile=cert_file,
        )
        try:
            settings.load()
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"cannot use the TLS key or certificate: {error}; give PEM files (--ssl-key-file, "
                "--ssl-cert-file)"
            ) from None
        super().__init__(settings)
        self.failed: BaseException | None = None
        self._life: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(QuietAccepts())
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        self._life = asyncio.ensure_future(self.service.run())
        self._life.add_done_callback(self._ended)

    def _ended(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None:
            self.failed = error
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self.service
        service.is_draining = True
        if service.n_running:
            log.info(
                "shutting down; %d running sequences have %g s to finish",
                service.n_running,
                service.config.limits.shutdown_s,
            )
        # Closing the model ends each remaining stream with an error event.
        timer = asyncio.get_running_loop().call_later(service.config.limits.shutdown_s, service.close)
        await super().shutdown(sockets)
        timer.cancel()
        service.close()
        if self._life is not None:
            with suppress(Exception):  # `failed` holds the error
                await asyncio.wait_for(asyncio.shield(self._life), LAST_EVENT_S + 15)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals like uvicorn, but let the process exit with 0 after a signal."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Only the main thread receives signals.
            return
        before = {number: signal.signal(number, self.handle_exit) for number in END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self.service.close()
        self.should_exit = True


def serve(service: Front, socks: list[socket.socket], *, key_file: str | None, cert_file: str | None) -> None:
    """Serve until a signal arrives. Raise the error of opening the model."""
    server = Server(service, key_file=key_file, cert_file=cert_file)
    server.run(sockets=socks)
    if server.failed is not None:
        raise server.failed
