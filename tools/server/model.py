"""A server's model. A thread opens the model while the server answers, and reopens it after the loss of its
process or device.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

from vkbackend.errors import DeviceLost, Timeout, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.llm import LLM
from vkbackend.tools.server.failures import Refusal

T = TypeVar("T")
WATCH_S = 1.0  # The loss of an idle engine is noticed within this time.
# The delay before reopening doubles each time that the model is lost within LASTED_S.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 60.0
# A model that worked longer resets the delay. Without this reset, if an engine is killed once a minute, each
# restart would soon wait a minute.
LASTED_S = 10.0
CLOSE_S = 15.0
REOPEN_S = 300.0  # How long an answer waits to continue.
# After this many failed attempts to reopen the model, for example because its file was removed, interrupted
# answers stop waiting and end with an error. The attempts take at least 8 s, and in this time a driver frees
# the memory of the lost process.
MOST_FAILED = 5
LOADING_RETRY_S = 2
NOT_READY = "model_not_ready"
REOPENING = "the model was lost and is being reopened; retry the request"
LOST = "the model was lost and cannot be opened again; the server's log says why"

log = logging.getLogger("vkbackend.serve")
Open = Callable[[Progress], LLM]


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class Abandoned(Exception):
    """Raised to stop loading when the server shuts down."""


class Model:
    """While the model is ready, `run` sets `llm`. `stats` are the engine's latest statistics. `on_ready` is
    called each time that the model has been opened. If `gives_up`, `run` ends after MOST_FAILED attempts to
    reopen the model."""

    def __init__(
        self, open_: Open, on_ready: Callable[[], None] = lambda: None, gives_up: bool = False
    ) -> None:
        self._open, self._on_ready, self._gives_up = open_, on_ready, gives_up
        self._n_failed = 0  # attempts to reopen the model since it was lost
        self.state, self.bytes_loaded, self.bytes_total = State.LOADING, 0, 0
        self.n_restarts = 0
        self.stats: dict[str, Any] = {}
        self.n_slots = 1
        self._llm: LLM | None = None
        self._lost, self._closed, self._opened = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ending, self._end = False, "the server is shutting down"

    @property
    def llm(self) -> LLM:
        """Raises Refusal (503) if the model is not ready."""
        if self._llm is None or self.state is not State.READY:
            raise self.not_ready()
        return self._llm

    def not_ready(self) -> Refusal:
        done = self.bytes_loaded / self.bytes_total if self.bytes_total else 0.0
        message = {
            State.LOADING: f"the model is loading ({done:.0%}); retry the request",
            State.RESTARTING: LOST if self._n_failed >= MOST_FAILED else REOPENING,
        }.get(self.state, self._end)
        extra = {"state": self.state.value, "progress": round(done, 4)}
        return Refusal(503, message, code=NOT_READY, retry_s=LOADING_RETRY_S, extra=extra)

    async def run(self) -> None:
        """Keep the model open until `close`. A reopened model gets the scales of adapters that clients set.
        Raise errors of the first opening, and of the last if `gives_up`."""
        wait_s = FIRST_WAIT_S / 2
        scales: list[tuple[int, float]] = []
        while True:
            began = time.monotonic()
            lasted_s = 0.0
            try:
                llm = await in_thread(lambda: self._open(self._progress))
            except Abandoned:
                return
            except VkbackendError as error:
                if not self.n_restarts:
                    raise
                self._n_failed += 1
                log.error("cannot reopen the model: %s", error)
                if self._n_failed == MOST_FAILED:
                    if self._gives_up:
                        self.close(LOST)
                        raise
                    self._tell_waiting()
            else:
                self._n_failed = 0
                if not self._ending:
                    ready = time.monotonic()
                    if scales:
                        llm.set_adapters(scales)
                    log.info("the model is ready (%.1f s)", ready - began)
                    self._llm, self.n_slots, self.state = llm, llm.n_slots, State.READY
                    self._lost.clear()
                    self._tell_waiting()
                    self._on_ready()
                    await self._watch(llm)
                    self._llm, lasted_s = None, time.monotonic() - ready
                    self.state = State.ENDED if self._ending else State.RESTARTING
                with suppress(TimeoutError, VkbackendError):
                    await asyncio.wait_for(in_thread(llm.close), CLOSE_S)
                scales = [(adapter["id"], adapter["scale"]) for adapter in llm.adapters]
            if self._ending:
                return
            self.bytes_loaded = self.bytes_total = 0
            self.n_restarts += 1
            wait_s = FIRST_WAIT_S if lasted_s >= LASTED_S else min(2 * wait_s, LONGEST_WAIT_S)
            log.error("the model is lost; reopening it in %.1f s", wait_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), wait_s)
                return

    def _tell_waiting(self) -> None:
        self._opened.set()
        self._opened = asyncio.Event()

    def _progress(self, done: int, total: int) -> None:
        if self._ending:
            raise Abandoned
        self.bytes_loaded, self.bytes_total = done, total

    async def _watch(self, llm: LLM) -> None:
        while not self._lost.is_set():
            try:
                self.stats = await in_thread(llm.stats)
            except VkbackendError as error:
                if not self._ending:
                    log.error("engine failed: %s", type(error).__name__)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), WATCH_S)

    async def reopened(self, lost: LLM | None) -> LLM:
        """Wait until the model has been opened again after the loss of `lost`. Raises Refusal (503) if the
        model cannot be opened, or after MOST_FAILED attempts."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REOPEN_S):
                while self.state is not State.ENDED and self._n_failed < MOST_FAILED:
                    if self._llm is not None and self._llm is not lost and self.state is State.READY:
                        return self._llm
                    await self._opened.wait()
        raise self.not_ready()

    async def recovered(self, error: VkbackendError) -> bool:
        """Return whether an error means that the model was lost. If so, first wait until it has been opened
        again. The lost engine may already have been replaced. Raises Refusal (503)."""
        llm, refuses = self._llm, getattr(error, "code", "") == NOT_READY
        if llm is not None and not llm.is_open:
            self.failed(error, llm)
        elif llm is not None:
            return refuses or isinstance(error, DeviceLost | Timeout)
        elif self.state is State.ENDED:
            return False
        await self.reopened(llm)
        return True

    def failed(self, error: BaseException, llm: LLM) -> None:
        is_broken = isinstance(error, DeviceLost | Timeout) or not llm.is_open
        if is_broken and llm is self._llm:
            self._lost.set()

    def close(self, reason: str = "") -> None:
        """Make `run` close the model, which ends running requests with `reason`."""
        self._ending, self.state = True, State.ENDED
        self._end = reason or self._end
        for event in (self._lost, self._closed, self._opened):
            event.set()


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a daemon thread, so that the process can exit if the function hangs in a driver."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = function()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="vkbackend-serve", daemon=True).start()
    return await future
