"""Many callers share one engine, which has its own thread. Ctrl-C interrupts only the callers, which wait in
short time slices."""

from __future__ import annotations

import _thread
import atexit
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from queue import Empty, SimpleQueue
from weakref import ref

from vkbackend import env, forks
from vkbackend.errors import Timeout, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.engine import engine_process
from vkbackend.models.engine.channel import Abandoned, Channel, Letter, Next
from vkbackend.models.engine.engine_process import WAIT_SLICE_S, Hosted
from vkbackend.models.engine.messages import (
    Answer,
    Close,
    EngineInfo,
    ErrorData,
    Event,
    Request,
    is_last,
)
from vkbackend.system import interrupts

EngineMaker = Callable[[Channel], Hosted]


class Mailbox:
    """Starts an engine and sends it requests. The engine ends when the mailbox is garbage-collected. Raises
    the errors of loading. `progress` runs in the caller's thread."""

    def __init__(self, open_: EngineMaker, progress: Progress | None = None) -> None:
        self.channel = channel = Channel()
        self._closed = self._forked = False
        self._ids = count()
        forks.own(self)
        try:
            # start_new_thread is one call of C code, which Ctrl-C cannot interrupt. Ctrl-C in Thread.start
            # could leave a thread partly started.
            _thread.start_new_thread(_start, (open_, channel, ref(self, channel.inbox.put)))
            self.info = self._loaded(progress)
        except BaseException:
            self.end()
            raise

    def _loaded(self, progress: Progress | None) -> EngineInfo:
        while True:
            try:
                news = self.channel.news.get(timeout=WAIT_SLICE_S)
            except Empty:
                continue
            if isinstance(news, EngineInfo):
                return news
            if news is None:
                raise VkbackendError("the model was not loaded: the program is ending")
            if isinstance(news, BaseException):
                raise news
            if progress is not None:
                progress(*news)

    def ask(self, make: Callable[[int], Request], *, eager: bool = False) -> Answers:
        """Send the request that `make` returns for a new id. If `eager`, the engine computes answers before
        the caller asks."""
        return Answers(self, *self.make(make), eager)

    def make(self, make: Callable[[int], Request]) -> tuple[int, Request]:
        self.check_open()
        id_ = next(self._ids)
        return id_, make(id_)

    def check_open(self) -> None:
        if self._forked:
            raise forks.refusal("this LLM")
        if self.channel.failed and not self._closed:
            raise self.channel.failed.exception()
        if self._closed or self.channel.ended:
            raise VkbackendError("this LLM is closed; open the model again with LLM(path, ...)")

    def close(self) -> None:
        """Release the engine; may be called again. After a Timeout, the engine is released when its step
        ends."""
        if not self._end(env.timeout_s() + engine_process.ANSWER_MARGIN_S + engine_process.CLOSE_S):
            raise Timeout("the engine is still in a step; close the LLM again when that has ended")

    def end(self) -> None:
        """Release the engine without raising errors."""
        self._end(engine_process.CLOSE_S)

    def _end(self, timeout_s: float) -> bool:
        self._closed = True
        if self._forked or self.channel.ended:
            return True
        self.channel.inbox.put(Close())
        # A finalizer may run in the engine's thread.
        if self.channel.thread in (None, threading.get_ident()):
            return True
        return self.channel.wait_for_end(timeout_s)

    def disown(self) -> None:
        self._forked = True


class Answers:
    """The answers to one request. Closing or dropping the iterable early cancels the request."""

    def __init__(self, mailbox: Mailbox, id_: int, request: Request, eager: bool) -> None:
        self._mailbox, self._id, self._eager = mailbox, id_, eager
        mail: SimpleQueue[Answer | None] = SimpleQueue()
        self._mail: SimpleQueue[Answer | None] | None = mail
        mailbox.channel.inbox.put(Letter(id_, request, mail, eager))

    def __iter__(self) -> Iterator[Answer]:
        try:
            ends = False
            while not ends:
                answer = self._next()
                ends = is_last(answer)
                yield answer
        finally:
            self.close()

    def events(self) -> Iterator[Event]:
        """Yield the answers, which must all be events."""
        for answer in self:
            assert isinstance(answer, Event), answer
            yield answer

    def _next(self) -> Answer:
        self._mailbox.check_open()
        assert self._mail is not None, "read on after close()"
        channel = self._mailbox.channel
        if self._mail.empty() and (not self._eager or self._id in channel.paused):
            channel.inbox.put(Next(self._id))
        while True:
            try:
                answer = self._mail.get(timeout=WAIT_SLICE_S)
            except Empty:
                answer = None
            if answer is not None:
                return answer
            self._mailbox.check_open()

    def close(self) -> None:
        self._mail = None


_working: set[Channel] = set()


def _start(open_: EngineMaker, channel: Channel, owner: ref[Mailbox]) -> None:
    try:
        arguments = open_, channel, owner
        threading.Thread(target=_live, args=arguments, name="vkbackend-engine", daemon=True).start()
    except BaseException as error:  # no thread could be started
        channel.news.put(error)
        channel.end()


def _live(open_: EngineMaker, channel: Channel, owner: ref[Mailbox]) -> None:
    """Python puts the weak reference `owner` into the inbox when the mailbox is garbage-collected."""
    interrupts.block_in_thread()
    channel.thread = threading.get_ident()
    _working.add(channel)
    try:
        try:
            channel.engine = engine = open_(channel)
        except Abandoned:
            return
        except BaseException as error:
            channel.news.put(error)
            return
        channel.news.put(engine.info)
        try:
            engine.serve(channel)
        except BaseException as error:
            channel.failed = ErrorData.of(error)
        finally:
            engine.close()
    finally:
        channel.engine = None
        _working.discard(channel)
        channel.end()


def _end_all() -> None:
    deadline = time.monotonic() + engine_process.CLOSE_S
    channels = list(_working)
    for channel in channels:
        channel.inbox.put(Close())
    for channel in channels:
        channel.wait_for_end(deadline - time.monotonic())


atexit.register(_end_all)
forks.forget(_working.clear)
