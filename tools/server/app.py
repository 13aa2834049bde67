"""The ASGI application, which checks requests, calls their endpoints and reports errors."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from vkbackend.tools.server import (
    adapters,
    chat_completions,
    completions,
    embeddings,
    llama_completion,
    messages,
    native,
    responses,
    static,
)
from vkbackend.tools.server.failures import ANTHROPIC, OPENAI, Api, ClientGone, Refusal, as_refusal
from vkbackend.tools.server.front import BODY_SEND, Endpoint, Front
from vkbackend.tools.server.guard import normal_path
from vkbackend.tools.server.streams import encode, reply
from vkbackend.tools.server.unsupported import UNSUPPORTED

log = logging.getLogger("vkbackend.serve")

SAFE = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]

ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    *UNSUPPORTED,
    ("GET", "/health", native.health),
    ("GET", "/models", native.models),
    ("GET", "/models/{name:path}", native.one_model),
    ("GET", "/props", native.props),
    ("GET", "/lora-adapters", adapters.adapters),
    ("POST", "/lora-adapters", adapters.set_adapters),
    ("POST", "/props", native.set_props),
    ("GET", "/slots", native.slots),
    ("POST", "/slots/{slot}", native.slot_action),
    ("GET", "/metrics", native.metrics),
    ("GET", "/stats", native.stats),
    ("POST", "/tokenize", native.tokens_of),
    ("POST", "/detokenize", native.text_of),
    ("POST", "/completions", completions.completions),
    ("POST", "/completion", llama_completion.completion),
    ("POST", "/infill", llama_completion.infill),
    ("POST", "/chat/completions", chat_completions.chat_completions),
    ("POST", "/chat/completions/input_tokens", chat_completions.count_input_tokens),
    ("POST", "/responses", responses.responses),
    ("POST", "/responses/input_tokens", responses.count_response_tokens),
    ("POST", "/messages", messages.messages),
    ("POST", "/messages/count_tokens", messages.count_tokens),
    ("POST", "/embedding", embeddings.embedding),
    ("POST", "/embeddings", embeddings.embeddings),
    ("POST", "/rerank", embeddings.rerank),
    ("POST", "/reranking", embeddings.rerank),
    ("POST", "/v2/rerank", embeddings.rerank),  # Cohere's
    ("POST", "/apply-template", chat_completions.apply_template),
    *(("GET", path, static.page) for path in static.FILES),
)


class App:
    def __init__(self, service: Front) -> None:
        self.service = service
        # An endpoint of the front replaces a model's endpoint with the same path.
        endpoints = {(method, path): endpoint for method, path, endpoint in (*ENDPOINTS, *service.endpoints)}
        routes = [
            Route(path, service.bind(endpoint), methods=[method])
            for (method, path), endpoint in endpoints.items()
            if endpoint is not static.page or service.config.shows_page
        ]
        self._router = Router(routes, redirect_slashes=False)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # uvicorn only serves HTTP
        answer = Answer(self.service, scope, send)
        scope[BODY_SEND] = send
        try:
            self._check(answer, scope)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204)(scope, receive, answer.send)
            else:
                await self._router(scope, receive, answer.send)
        except ClientGone:
            pass
        except HTTPException as error:
            await answer.fail(_of_starlette(error, answer.path))
        except Exception as error:
            await answer.fail(error)
        finally:
            answer.log(scope, self._known(answer))

    def _known(self, answer: Answer) -> str:
        """Return the path of the endpoint that a request names, for the log. Unknown paths may contain a
        client's text, so they are not logged."""
        if answer.path in static.FILES:
            return "page"
        paths = (route.path for route in self._routes if route.path_regex.match(answer.path))
        return next(paths, "unknown")

    def _check(self, answer: Answer, scope: Scope) -> None:
        """Raises Refusal."""
        is_versioned = scope["path"].lstrip("/").startswith("v1/")
        scope["app"], scope["path"] = self, answer.path  # else Starlette answers errors
        scope["state"] = {"is_versioned": is_versioned}
        headers = dict(scope["headers"])
        answer.cors = self.service.config.guard.cors(headers, scope["method"])
        answer.is_page = answer.path in static.FILES  # The page loads without a key.
        self.service.config.guard.check(answer.path, scope["method"], headers, answer.is_page)
        if self.service.is_draining and scope["method"] == "POST":
            raise Refusal(503, "the server is shutting down", retry_s=5)


class Answer:
    def __init__(self, service: Front, scope: Scope, send: Send) -> None:
        self.service, self._send = service, send
        self.path = normal_path(scope["path"])
        self.status, self.is_page = 0, False
        self.cors: list[tuple[bytes, bytes]] = []
        self._began = time.monotonic()

    @property
    def api(self) -> Api:
        return ANTHROPIC if self.path.startswith("/messages") else OPENAI

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [*SAFE, *self.cors]
            if self.is_page:
                extra.append((b"content-security-policy", static.CSP))
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        refusal = self.service.refusal(error)
        self.service.note(error)
        if not isinstance(refusal, Refusal) or as_refusal(error).status == 500:
            log_bug(error)
        if self.status:
            return
        assert isinstance(refusal, Refusal)
        headers = []
        if refusal.retry_s is not None:
            headers.append((b"retry-after", b"%d" % refusal.retry_s))
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status == 501:
            # Without this header, the SDKs retry after any 5xx.
            headers.append((b"x-should-retry", b"false"))
        if refusal.status == 408:
            headers.append((b"connection", b"close"))
        await reply(self.send, refusal.status, encode(self.api.body(refusal)), headers)

    def log(self, scope: Scope, path: str) -> None:
        """Log a request without contents, keys, query strings or unknown paths."""
        self.service.metrics.requests[path, self.status] += 1
        if not self.service.config.logs_requests:
            return
        took_s = time.monotonic() - self._began
        client = (scope.get("client") or ("-",))[0]
        n_prompt, n_made = scope.get("state", {}).get("tokens", (0, 0))
        tokens = f" {n_prompt} + {n_made} tokens" if n_prompt else ""
        status = self.status or "gone"
        log.info("%s %s %s %s %.3f s%s", client, scope["method"], path, status, took_s, tokens)


def log_bug(error: BaseException) -> None:
    """Log the traceback but not the error's message, because it may contain a client's text."""
    places = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s, a bug in this server:\n%s", type(error).__name__, places)


def _of_starlette(error: HTTPException, path: str) -> Refusal:
    messages: dict[int, Any] = {
        404: f"no endpoint {path[:200]!r}; docs/serving.md lists the endpoints",
        405: "wrong method for this endpoint; docs/serving.md lists the methods",
    }
    return Refusal(error.status_code, messages.get(error.status_code, str(error.detail)))
