"""Where the engine runs: in this process, or in one of its own behind a pipe. Both are `post`, `poll` and
`close`.

A process of its own keeps other Python threads from slowing the relay between segments. It is spawned, never
forked; it ends when its pipe does, and every wait for it has a deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from vkbackend import env
from vkbackend.errors import DeviceLost, Timeout, VkbackendError
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import (
    Close,
    EngineInfo,
    ErrorData,
    Event,
    Progress,
    Request,
)
from vkbackend.models.options import Options

ANSWER_MARGIN_S = 15.0  # the engine's own waits end after env.timeout_s(), then it drains and reports
CLOSE_S = 10.0  # how long the process gets to release everything before it is ended
WAIT_SLICE_S = 0.5  # a signal is noticed this soon

Open = Callable[[Options, Progress | None], Engine]


class EngineClient(Protocol):
    """An engine, wherever it is."""

    info: EngineInfo

    def post(self, request: Request) -> None:
        """Hand over a request; never blocks, may be called from any thread and from a finalizer."""

    def poll(self) -> list[Event]:
        """Let the engine work until there is something new; one caller at a time. Raises what breaks it."""

    def close(self) -> None:
        """Release everything; may be called twice."""


class LocalEngine:
    """The engine in this process: `poll` is a step of it."""

    def __init__(self, options: Options, progress: Progress | None = None, open_: Open = Engine.open) -> None:
        self._engine = open_(options, progress)
        self._posted: deque[Request] = deque()
        self.info = self._engine.info

    def post(self, request: Request) -> None:
        self._posted.append(request)

    def poll(self) -> list[Event]:
        while self._posted:
            self._engine.submit(self._posted.popleft())
        return self._engine.step()

    def close(self) -> None:
        self._engine.close()


# ---- a process of its own ----


@dataclass(frozen=True, slots=True)
class _Loading:
    """Bytes loaded so far."""

    done: int
    total: int


class RemoteEngine:
    """The engine in a spawned process. Raises the errors of loading; DeviceLost if it dies, Timeout if it
    hangs.
    """

    def __init__(self, options: Options, progress: Progress | None = None, open_: Open = Engine.open) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, options, open_), name="vkbackend-engine", daemon=True
        )
        self._outbox: SimpleQueue[Request | None] = SimpleQueue()
        self._closed = False
        try:
            self._process.start()
            theirs.close()  # so that the pipe ends with the process
            # A thread writes, because a write to a process that does not read would block without a deadline.
            threading.Thread(target=_write, args=(self._conn, self._outbox), daemon=True).start()
            while True:
                message = self._receive("to load the model")
                if isinstance(message, EngineInfo):
                    break
                if isinstance(message, ErrorData):
                    raise message.exception()
                if progress is not None:
                    progress(message.done, message.total)
        except BaseException:
            self.close()
            raise
        self.info = message

    def post(self, request: Request) -> None:
        self._outbox.put(request)

    def poll(self) -> list[Event]:
        events = self._receive("to answer")
        if isinstance(events, ErrorData):
            raise events.exception()
        return events

    def _receive(self, what: str) -> Any:
        allowed_s = env.timeout_s() + ANSWER_MARGIN_S
        deadline = time.monotonic() + allowed_s
        while time.monotonic() < deadline:
            if wait([self._conn], WAIT_SLICE_S):
                try:
                    return self._conn.recv()
                except (EOFError, OSError):
                    raise self._death(what) from None
        self._process.kill()
        raise Timeout(
            f"the engine's process was expected {what} and said nothing for {allowed_s:.0f} s, so it was "
            "ended; VKBACKEND_TIMEOUT sets how many seconds a device may take"
        )

    def _death(self, what: str) -> DeviceLost:
        self._process.join(1)
        return DeviceLost(
            f"the engine's process ended (exit code {self._process.exitcode}) while it was expected {what}; "
            "its last words are on stderr. Open the model again; a script that uses process=True needs "
            "`if __name__ == '__main__':` around its main part"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._outbox.put(Close())
            deadline = time.monotonic() + CLOSE_S
            while self._process.is_alive() and time.monotonic() < deadline:
                # What it still says is read and dropped, so that it is not stuck saying it.
                if self._conn in wait([self._conn, self._process.sentinel], WAIT_SLICE_S):
                    try:
                        self._conn.recv()
                    except (EOFError, OSError):
                        self._process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._outbox.put(None)
            if self._process.is_alive():
                self._process.kill()
            if self._process.pid is not None:
                self._process.join(CLOSE_S)  # one that a driver holds in the kernel does not even die
                if self._process.exitcode is not None:
                    self._process.close()
            self._conn.close()


def _write(conn: Connection, outbox: SimpleQueue[Request | None]) -> None:
    """The thread that sends; ends at None or with the pipe."""
    with suppress(OSError, ValueError):
        while (request := outbox.get()) is not None:
            conn.send(request)


def serve(conn: Connection, options: Options, open_: Open = Engine.open) -> None:
    """The main function of the process: load, then answer requests until Close or the end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    inbox: SimpleQueue[Request] = SimpleQueue()
    engine: Engine | None = None
    try:
        engine = open_(options, lambda done, total: conn.send(_Loading(done, total)))
        threading.Thread(target=_read, args=(conn, inbox), daemon=True).start()
        conn.send(engine.info)
        while True:
            try:
                request = inbox.get(block=not engine.busy)
            except Empty:
                if events := engine.step():
                    conn.send(events)
                continue
            if isinstance(request, Close):
                break
            engine.submit(request)
    except OSError:
        pass  # the parent is gone
    except VkbackendError as error:
        _report(conn, ErrorData.of(error))
    except Exception:
        _report(conn, ErrorData("VkbackendError", f"the engine failed: {traceback.format_exc()}"))
    finally:
        if engine is not None:
            engine.close()
        conn.close()


def _report(conn: Connection, error: ErrorData) -> None:
    with suppress(OSError):
        conn.send(error)


def _read(conn: Connection, inbox: SimpleQueue[Request]) -> None:
    """The thread that receives: a long request cannot block the parent while the engine writes to it."""
    try:
        while not isinstance(request := conn.recv(), Close):
            inbox.put(request)
    except (EOFError, OSError):
        request = Close()
    inbox.put(request)
    # The engine gets the time of one hung wait; a process that outlives its parent longer would hold the
    # devices.
    timer = threading.Timer(CLOSE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
