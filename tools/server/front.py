"""The common part of servers with one or several models: settings, counters, reading bodies and sending
events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import vkbackend
from vkbackend.errors import VkbackendError
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields, read_entries, read_fields
from vkbackend.tools.server.failures import OPENAI, Api, as_refusal
from vkbackend.tools.server.guard import Guard
from vkbackend.tools.server.limits import Limits
from vkbackend.tools.server.metrics import Metrics

FINGERPRINT = f"vkbackend-{vkbackend.__version__}"
BODY_SEND = "vkbackend.body_send"  # scope[BODY_SEND] is uvicorn's `send`.


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the command line. `defaults` are sampling options."""

    model_path: str
    alias: str
    guard: Guard = field(default_factory=Guard)
    limits: Limits = field(default_factory=Limits)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    slot_folder: str | None = None
    shows_slots: bool = True
    logs_requests: bool = True
    template: str | None = None  # replaces the model's template
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    shows_page: bool = True
    reasoning_format: str = "auto"  # requests may choose another
    shows_metrics: bool = False
    takes_props: bool = False
    is_verbose: bool = False  # Answers have `__verbose`.
    prefills: bool = True  # Continue the assistant's last message.
    pooling: str | None = None  # replaces the file's
    embd_normalize: int = 2
    embeds_only: bool = False
    reranks_only: bool = False
    media_hosts: tuple[str, ...] = ()  # names of hosts from which images may be fetched


class Json(Response):
    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(streams.encode(value), status, headers, "application/json")


class Events(Response):
    def __init__(
        self,
        service: Front,
        events: AsyncGenerator[bytes, None],
        fail: Callable[[BaseException], bytes],
        ping_s: float | None,
    ) -> None:
        super().__init__()
        self._service, self._events, self._fail = service, events, fail
        self._ping_s = service.config.limits.ping_s if ping_s is None else ping_s

    def opened(self) -> aclosing[AsyncGenerator[bytes, None]]:
        """Return the events, for use in a stream that has already begun."""
        return aclosing(self._events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def fail(error: BaseException) -> bytes:
            return self._fail(self._service.refusal(error))

        # Events use uvicorn's own `send`, so they bypass the wrapper that adds headers.
        body_send = scope.get(BODY_SEND, send)
        stream = streams.EventStream(send, body_send, self._ping_s, fail)
        failed = await stream.run(self._events, receive)
        if failed is not None:
            self._service.note(failed)


def error_event(api: Api) -> Callable[[BaseException], bytes]:
    name = "error" if api.anthropic else None
    return lambda error: streams.event(api.body(error), name)


# Answers a request. The first argument is a Front or a Service.
Endpoint = Callable[[Any, Request], Awaitable[Response]]
Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """Answers requests. `endpoints` (method, path, endpoint) precede the endpoints of a model."""

    endpoints: Sequence[tuple[str, str, Endpoint]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.is_draining = False
        self.started = int(time.time())
        self.notes: list[BaseException] = []  # bugs to log
        self._large = asyncio.Lock()

    @property
    def n_running(self) -> int:
        raise NotImplementedError

    def bind(self, endpoint: Endpoint) -> Handler:
        return partial(endpoint, self)

    async def run(self) -> None:
        """Keep models open until `close`. Raises the error of opening the only model."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the models, which ends running requests."""
        raise NotImplementedError

    async def fields(self, request: Request) -> Fields:
        known: Fields | None = getattr(request.state, "fields", None)
        if known is None:
            headers = dict(request.scope["headers"])
            known = await read_fields(request.receive, headers, self.config.limits, self._large)
            request.state.fields = known
        return known

    async def entries(self, request: Request) -> list[Fields]:
        headers = dict(request.scope["headers"])
        return await read_entries(request.receive, headers, self.config.limits, self._large)

    def stream(
        self, events: AsyncGenerator[bytes, None], api: Api = OPENAI, ping_s: float | None = None
    ) -> Events:
        """Send events. `ping_s` replaces the server's interval of comments, and may be infinite."""
        return Events(self, events, error_event(api), ping_s)

    def refusal(self, error: BaseException) -> BaseException:
        return as_refusal(error)

    def note(self, error: BaseException) -> None:
        if not isinstance(error, VkbackendError):
            self.notes = [*self.notes[-9:], error]
