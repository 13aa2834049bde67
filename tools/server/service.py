from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import vkbackend
from vkbackend.checks import whole_number
from vkbackend.errors import VkbackendError
from vkbackend.models.llm import LLM
from vkbackend.tools.server import streams
from vkbackend.tools.server.adapter_fields import adapter_options
from vkbackend.tools.server.body import Fields, read_entries, read_fields
from vkbackend.tools.server.failures import OPENAI, Api, Refusal, as_refusal
from vkbackend.tools.server.generations import J, Piece, Tally, merged
from vkbackend.tools.server.guard import Guard
from vkbackend.tools.server.limits import Admission, Limits
from vkbackend.tools.server.metrics import Metrics
from vkbackend.tools.server.model import Model, State
from vkbackend.tools.server.sampling import sampling_of

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


class Json(Response):
    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(streams.encode(value), status, headers, "application/json")


class Events(Response):
    def __init__(
        self,
        service: Service,
        events: AsyncGenerator[bytes, None],
        fail: Callable[[BaseException], bytes],
        ping_s: float | None,
    ) -> None:
        super().__init__()
        self._service, self._events, self._fail = service, events, fail
        self._ping_s = service.config.limits.ping_s if ping_s is None else ping_s

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


class Service:
    def __init__(self, config: Config, model: Model) -> None:
        self.config, self.model = config, model
        self.admission = Admission(config.limits, n_slots=1)
        self.metrics = Metrics()
        self.running: dict[int, Tally] = {}  # by slot, for /slots
        self.is_draining = False
        self.started = int(time.time())
        self.notes: list[BaseException] = []  # bugs to log
        self._large = asyncio.Lock()

    # ---- a request ----

    async def fields(self, request: Request) -> Fields:
        headers = dict(request.scope["headers"])
        return await read_fields(request.receive, headers, self.config.limits, self._large)

    async def entries(self, request: Request) -> list[Fields]:
        """Read a body that is a list of objects."""
        headers = dict(request.scope["headers"])
        return await read_entries(request.receive, headers, self.config.limits, self._large)

    def ready(self) -> LLM:
        """Raises Refusal (503) if the model is not ready."""
        llm = self.model.llm
        self.admission.n_slots = llm.n_slots
        return llm

    def sampling(self, fields: Fields, llm: LLM) -> dict[str, Any]:
        def tokenize(text: str) -> list[int]:
            return llm.tokenize(text, add_special=False)

        names = self.config.alias, *self.config.other_names
        options = sampling_of(fields, self.config.defaults, self.config.limits, tokenize)
        return options | adapter_options(fields, llm, names)

    def max_tokens(self, fields: Fields, *names: str) -> int | None:
        """Return the limit from the first of `names` in the request, or the server's limit. None, or -1 in
        the request, means that only the context limits the answer."""
        limits = [fields.whole(name, -1, (1 << 31) - 1, None) for name in names]
        most = next((limit for limit in limits if limit is not None), None)
        if most is None:
            return self.config.max_tokens
        return None if most == -1 else most

    def n_of(self, fields: Fields, name: str, llm: LLM) -> int:
        if not fields.has(name):
            return 1
        hint = " (as many as there are slots, --parallel)"
        return whole_number(fields.name(name), fields.get(name), 1, llm.n_slots, hint)

    # ---- generations ----

    async def generate(
        self, request: Request, llm: LLM, jobs: Sequence[J], *, streamed: bool
    ) -> AsyncGenerator[tuple[J, Any, Tally], None]:
        """Yield the chunks of all jobs as they arrive. Raises Refusal (429) and the engine's errors."""
        tallies = {
            id(job): Tally(len(job.ids), options=job.options, max_tokens=job.max_tokens) for job in jobs
        }
        began = time.monotonic()
        with self.admission.enter(len(jobs), streams=streamed):
            try:
                if len(jobs) == 1:
                    (job,), (tally,) = jobs, tallies.values()
                    async with aclosing(job.start(llm)) as pieces:
                        async for piece in pieces:
                            self._add(tally, piece, began)
                            yield job, piece, tally
                    return
                async with aclosing(merged(llm, jobs)) as chunks:
                    async for job, piece in chunks:
                        self._add(tally := tallies[id(job)], piece, began)
                        yield job, piece, tally
            except VkbackendError as error:
                self.model.failed(error, llm)
                if type(error) is VkbackendError and llm.is_open:
                    raise Refusal(400, str(error)) from None  # no token is allowed
                raise
            finally:
                self._count(tallies.values(), time.monotonic() - began)
                request.state.tokens = (
                    sum(t.prompt_n for t in tallies.values()),
                    sum(t.n_tokens for t in tallies.values()),
                )

    def _add(self, tally: Tally, piece: Piece, began: float) -> None:
        tally.add(piece)
        if tally.n_tokens and not tally.is_known:
            tally.is_known = True
            self.metrics.first_token.add(time.monotonic() - began)
            self.running[tally.slot] = tally
        if tally.finish_reason:
            self._forget(tally)

    def _forget(self, tally: Tally) -> None:
        if self.running.get(tally.slot) is tally:
            del self.running[tally.slot]

    def _count(self, tallies: Any, took_s: float) -> None:
        metrics = self.metrics
        self.admission.took(took_s)
        metrics.whole_request.add(took_s)
        metrics.cancelled += any(tally.finish_reason is None for tally in tallies)
        for tally in tallies:
            self._forget(tally)
            metrics.prompt_tokens += tally.prompt_n
            metrics.cached_tokens += tally.cached_n
            metrics.prompt_s += tally.timings.get("prompt_ms", 0.0) / 1e3
            metrics.tokens += tally.n_tokens
            metrics.decode_s += tally.timings.get("decode_ms", 0.0) / 1e3
            metrics.longest = max(metrics.longest, tally.prompt_n + tally.n_tokens)

    def stream(
        self, events: AsyncGenerator[bytes, None], api: Api = OPENAI, ping_s: float | None = None
    ) -> Events:
        """Send events. `ping_s` replaces the server's interval of comments, and may be infinite."""
        return Events(self, events, error_event(api), ping_s)

    # ---- errors ----

    def refusal(self, error: BaseException) -> BaseException:
        """Return the response for an error, or 503 while the server shuts down."""
        refusal = as_refusal(error)
        return (
            self.model.not_ready() if refusal.status == 503 and self.model.state is State.ENDED else refusal
        )

    def note(self, error: BaseException) -> None:
        """Store an untyped error (a bug) for the log."""
        if not isinstance(error, VkbackendError):
            self.notes = [*self.notes[-9:], error]
