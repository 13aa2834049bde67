"""Endpoints of llama-server that this server lacks. The server answers such a request with 501 and the
reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import Front

SPEECH = "audio is not supported yet; send a transcript as text"
ROUTER = "the server has one model; start it with --models-dir or --models-preset for several"
STREAMS = "a stream that has ended cannot be resumed; send the request again"
TOOLS = "the server runs no tools; the client runs the calls that the model writes"
PROXY = "the server never fetches a URL for a request; let the client fetch it"
CONTROL = "a running thought cannot be ended; limit it with reasoning_effort or close the stream"

REASONS: tuple[tuple[str, str, str], ...] = (
    ("POST", "/audio/transcriptions", SPEECH),
    ("POST", "/models", ROUTER),
    ("DELETE", "/models", ROUTER),
    ("POST", "/models/load", ROUTER),
    ("POST", "/models/unload", ROUTER),
    ("GET", "/models/sse", ROUTER),
    ("GET", "/stream", STREAMS),
    ("DELETE", "/stream", STREAMS),
    ("POST", "/streams/lookup", STREAMS),
    ("GET", "/tools", TOOLS),
    ("POST", "/tools", TOOLS),
    ("GET", "/cors-proxy", PROXY),
    ("POST", "/cors-proxy", PROXY),
    ("POST", "/chat/completions/control", CONTROL),
)


def refusing(reason: str) -> Callable[[Front, Request], Awaitable[Response]]:
    async def refuse(service: Front, request: Request) -> Response:
        raise Refusal(501, reason)

    return refuse


UNSUPPORTED = tuple((method, path, refusing(reason)) for method, path, reason in REASONS)
