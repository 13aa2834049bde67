"""Runs the engine in this process or in a separate one. In a separate process, other Python threads do not
delay the relay, which synchronizes devices between segments.

The separate process is spawned, never forked, and ends when its pipe closes. Every wait for the process has a
deadline.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from vkbackend import env, forks
from vkbackend.errors import DeviceLost, Timeout, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.engine.channel import Channel
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import (
    Close,
    EngineInfo,
    ErrorData,
    News,
    Request,
)
from vkbackend.models.options import Options
from vkbackend.system import interrupts
from vkbackend.system.waiting import Conn, Waiter

ANSWER_MARGIN_S = 15.0  # Time after env.timeout_s() for the engine to finish and report.
CLOSE_S = 10.0  # Time to release everything before the process is killed.
WAIT_SLICE_S = 0.5
IDLE_S = 0.2  # An idle engine process records steps ahead after this time.
STUCK_S = 0.02  # An engine without rows checks for work after this time.

Open = Callable[[Options, Progress | None], Engine]


class Hosted(Protocol):
    info: EngineInfo

    def serve(self, channel: Channel) -> None:
        """Answer requests until Close arrives. Raises errors that end the engine."""

    def close(self) -> None: ...


class LocalEngine:
    """Computes only while a caller waits, so the same sequence of calls leads to the same steps."""

    def __init__(self, options: Options, channel: Channel, open_: Open = Engine.open) -> None:
        self._engine = open_(options, channel.tell)
        self.info = self._engine.info

    def serve(self, channel: Channel) -> None:
        engine = self._engine
        while True:
            try:
                idle = not (engine.busy and channel.is_awaited())
                timeout = STUCK_S if engine.is_stuck and not idle else None
                request = channel.sort(channel.inbox.get(idle or timeout is not None, timeout))
            except Empty:
                channel.deliver(engine.step())
                continue
            if isinstance(request, Close):
                return
            if request is not None:
                engine.submit(request)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, slots=True)
class _Loading:
    done: int
    total: int


class Child(Protocol):
    """The required methods of multiprocessing.Process."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class RemoteEngine:
    """Computes even while no caller waits. Raises the errors of loading, DeviceLost if the process dies, and
    Timeout if it is silent for too long."""

    def __init__(self, options: Options, channel: Channel, open_: Open = Engine.open) -> None:
        self._channel = channel
        self._process, self._conn = self._start(options, open_)
        self._waiter = Waiter(self._conn)
        # A thread writes, because writing to a process that does not read would block without a deadline.
        self._writer = threading.Thread(target=self._write, name="vkbackend-writer", daemon=True)
        self._loaded, self._heard = False, time.monotonic()
        try:
            forks.own(self)
            loaded = 0, 0
            while not isinstance(message := self._receive("to load the model"), EngineInfo):
                if isinstance(message, ErrorData):
                    raise message.exception()
                loaded = (message.done, message.total) if message else loaded
                channel.tell(*loaded)
        except BaseException:
            self.close()
            raise
        self.info, self._loaded = message, True

    def _start(self, options: Options, open_: Open) -> tuple[Child, Conn]:
        context = multiprocessing.get_context("spawn")
        conn, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, options, open_), name="vkbackend-engine", daemon=True
        )
        try:
            process.start()
        except BaseException:
            conn.close()
            raise
        finally:
            theirs.close()
        return process, conn

    def serve(self, channel: Channel) -> None:
        self._writer.start()
        while not channel.closing:
            news = self._receive("to answer")
            if isinstance(news, ErrorData):
                raise news.exception()
            if news:
                channel.deliver(News(*news))

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while True:
                if (request := self._channel.sort(self._channel.inbox.get())) is not None:
                    self._conn.send(request)
                if isinstance(request, Close):
                    return

    def _receive(self, purpose: str) -> Any:
        """Return a message, or None if none arrives within a time slice or if the channel closes."""
        if self._waiter.wait(WAIT_SLICE_S):
            self._heard = time.monotonic()
            try:
                return self._conn.recv()
            except (EOFError, OSError):
                if self._channel.closing:
                    return None
                raise self._death(purpose) from None
        # On Windows, this process holds the other end of the pipe as well until the child has begun to read.
        if not (self._channel.closing or self._process.is_alive() or self._waiter.wait(0)):
            raise self._death(purpose)
        if self._loaded and not self._channel.readers:
            self._heard = time.monotonic()
        allowed_s = env.timeout_s() + ANSWER_MARGIN_S
        if time.monotonic() - self._heard < allowed_s:
            return None
        self._process.kill()
        raise Timeout(
            f"the engine's process was expected {purpose} and said nothing for {allowed_s:.0f} s, so it was "
            "ended; VKBACKEND_TIMEOUT sets how many seconds a device may take"
        )

    def _death(self, purpose: str) -> DeviceLost:
        self._process.join(1)
        return DeviceLost(
            f"the engine's process ended (exit code {self._process.exitcode}) while it was expected "
            f"{purpose}; its last words are on stderr. Open the model again; a script that uses process=True "
            "needs `if __name__ == '__main__':` around its main part"
        )

    def close(self) -> None:
        self._channel.inbox.put(Close())
        # A process that is still loading does not read Close.
        deadline = time.monotonic() + (CLOSE_S if self._loaded else 0)
        try:
            while self._process.is_alive() and time.monotonic() < deadline:
                try:
                    if self._conn.poll(WAIT_SLICE_S):  # On Windows `poll` raises when the process has ended.
                        self._conn.recv()  # A full pipe would block the process.
                except (EOFError, OSError):
                    self._process.join(max(0.0, deadline - time.monotonic()))
        finally:
            if self._process.is_alive():
                self._process.kill()
            if self._process.pid is not None:
                # `join` has a timeout, because a driver may block the process in the kernel.
                self._process.join(CLOSE_S)
                if self._process.exitcode is not None:
                    self._process.close()
            if self._writer.is_alive():
                self._writer.join(CLOSE_S)
            self._waiter.close()
            self._conn.close()

    def disown(self) -> None:
        # A forked child that exits would otherwise end the parent's engine.
        getattr(multiprocessing.process, "_children", set()).discard(self._process)


Watch = Callable[[Callable[[VkbackendError], None]], None]


def serve(conn: Conn, options: Options, open_: Open = Engine.open, watch: Watch = lambda tell: None) -> None:
    """Answer requests until Close or the end of the pipe. `watch(tell)` is called once; a group of nodes then
    calls `tell` when a node is lost."""
    interrupts.ignore()
    inbox: SimpleQueue[Request | VkbackendError] = SimpleQueue()
    engine: Engine | None = None
    watch(inbox.put)
    lock = threading.Lock()  # several threads of devices call `compiled`

    def compiled() -> None:
        """Send an empty message, to show that the engine is alive."""
        with lock:
            conn.send(None)

    try:
        engine = open_(options, lambda done, total: conn.send(_Loading(done, total)))
        threading.Thread(target=_read, args=(conn, inbox), daemon=True).start()
        conn.send(engine.info)
        engine.runner.tell_of_compiling(compiled)
        if env.records_ahead():
            engine.runner.allow_padding()
        more = True
        while True:
            try:
                timeout = STUCK_S if engine.is_stuck and engine.busy else None
                if not engine.busy:
                    due_s = engine.idle.save_due_s()
                    timeout = IDLE_S if more or due_s == 0 else due_s
                request = inbox.get(not engine.busy or timeout is not None, timeout)
            except Empty:
                if not engine.busy and engine.idle.save_due_s() == 0:
                    engine.idle.save()
                while more and not engine.busy and inbox.empty():
                    more = engine.idle.advance(lambda: not inbox.empty())
                if engine.busy and (news := engine.step()):
                    conn.send((news.ids, news.answers))
                continue
            more = True
            if isinstance(request, Close):
                break
            if isinstance(request, VkbackendError):
                raise request
            engine.submit(request)
    except OSError:
        pass  # the parent has exited
    except Exception as error:
        _report(conn, ErrorData.of(error))
    finally:
        if engine is not None:
            engine.close()
        conn.close()


def _report(conn: Conn, error: ErrorData) -> None:
    with suppress(OSError):
        conn.send(error)


def _read(conn: Conn, inbox: SimpleQueue[Request | VkbackendError]) -> None:
    """Receive in a thread, because parent and engine could block each other if both only sent."""
    try:
        while not isinstance(request := conn.recv(), Close):
            inbox.put(request)
    except (EOFError, OSError):
        request = Close()
    inbox.put(request)
    # A process that outlives its parent would keep the devices open.
    timer = threading.Timer(CLOSE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
