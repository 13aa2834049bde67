"""A server with several models. A request goes to the service of the model that it names, and waits while
this model loads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vkbackend.errors import VkbackendError
from vkbackend.tools.server import (
    adapters,
    chat_completions,
    completions,
    llama_completion,
    messages,
    responses,
    static,
    streams,
)
from vkbackend.tools.server.failures import ANTHROPIC, OPENAI
from vkbackend.tools.server.front import Endpoint, Events, Handler
from vkbackend.tools.server.router.catalog import Catalog
from vkbackend.tools.server.router.endpoints import ENDPOINTS
from vkbackend.tools.server.router.tenant import Tenant
from vkbackend.tools.server.service import MOST_STUCK
from vkbackend.tools.server.unsupported import UNSUPPORTED

STREAMING: frozenset[Endpoint] = frozenset(
    (
        completions.completions,
        llama_completion.completion,
        llama_completion.infill,
        chat_completions.chat_completions,
        responses.responses,
        messages.messages,
    )
)
# The body of these endpoints is a list, so it cannot name a model.
LISTS: frozenset[Endpoint] = frozenset((adapters.set_adapters,))


class Leased(Response):
    """Sends a response, then releases the request's model in the pool."""

    def __init__(self, response: Response, release: Callable[[], None]) -> None:
        super().__init__()
        self._response, self._release = response, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._release()


class Router(Catalog):
    endpoints = ENDPOINTS
    own = {endpoint for _, _, endpoint in (*ENDPOINTS, *UNSUPPORTED)} | {static.page}

    def bind(self, endpoint: Endpoint) -> Handler:
        return partial(endpoint, self) if endpoint in self.own else partial(self.forward, endpoint)

    async def forward(self, endpoint: Endpoint, request: Request) -> Response:
        name = request.query_params.get("model", "")
        fields = None
        if request.method == "POST" and endpoint not in LISTS and not name:
            fields = await self.fields(request)
            name = fields.text("model", "")
        tenant, loads = self.find(name), _switch(request, "autoload")
        counts = request.method == "POST"
        if fields is not None and endpoint in STREAMING and not tenant.admits and fields.switch("stream"):
            events = self._events(endpoint, request, tenant, loads)
            is_anthropic = endpoint is messages.messages
            return self.stream(events, ANTHROPIC if is_anthropic else OPENAI)
        if fields is None:
            await self.pool.acquire(tenant, loads)
        else:
            async with streams.while_connected(request.receive):
                await self.pool.acquire(tenant, loads)
        release = partial(self.pool.release, tenant, counts=counts)
        try:
            return Leased(await self._call(endpoint, request, tenant), release)
        except BaseException:
            release()
            raise

    async def _call(self, endpoint: Endpoint, request: Request, tenant: Tenant) -> Response:
        """Call the endpoint, and call it again if the engine is lost before the answer begins."""
        service = self.service_of(tenant)
        assert service is not None, "the request is admitted"
        for _ in range(MOST_STUCK):
            try:
                return await endpoint(service, request)
            except VkbackendError as error:
                if not await service.model.recovered(error):
                    raise
        return await endpoint(service, request)

    async def _events(
        self, endpoint: Endpoint, request: Request, tenant: Tenant, loads: bool | None
    ) -> AsyncGenerator[bytes, None]:
        """Wait for the model, then yield the events of a streamed answer. While it waits, comments are
        sent."""
        await self.pool.acquire(tenant, loads)
        try:
            response: Any = await self._call(endpoint, request, tenant)
            assert isinstance(response, Events)
            async with response.opened() as events:
                async for event in events:
                    yield event
        finally:
            self.pool.release(tenant)


def _switch(request: Request, name: str) -> bool | None:
    value = request.query_params.get(name)
    return None if value is None else value in ("1", "true")
