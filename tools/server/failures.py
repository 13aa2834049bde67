"""Convert errors to HTTP responses in the format of the called API.

The SDKs of OpenAI and Anthropic retry only after 408, 409, 429 and 5xx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.errors import (
    DeadlineExceeded,
    DeviceLost,
    InvalidArgument,
    OutOfDeviceMemory,
    PromptTooLong,
    QueueFull,
    StateError,
    Timeout,
    UnsupportedFeature,
    UnsupportedModel,
    VkbackendError,
)

TYPES = {  # status -> OpenAI's and Anthropic's error type
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    501: ("not_supported_error", "invalid_request_error"),
    503: ("unavailable_error", "overloaded_error"),
    504: ("timeout_error", "api_error"),
}

# Clients recognize an overlong conversation by this code and by the message. LiteLLM looks for llama-server's
# "exceeds the available context size", Claude Code for Anthropic's "prompt is too long".
TOO_LONG = "context_length_exceeded"


class Refusal(VkbackendError):
    """`param` names the wrong field, `code` is OpenAI's error code, `retry_s` sets Retry-After, and `extra`
    holds more body fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_s, self.extra = retry_s, extra or {}


class ClientGone(Exception):
    """The client disconnected."""


@dataclass(frozen=True, slots=True)
class Api:
    anthropic: bool = False

    def body(self, error: BaseException) -> dict[str, Any]:
        failure = as_refusal(error)
        kind = TYPES.get(failure.status, TYPES[400 if failure.status < 500 else 500])[self.anthropic]
        if self.anthropic:
            extra, text = failure.extra, str(failure)
            if failure.code == TOO_LONG:
                text = f"prompt is too long: {extra['n_prompt_tokens']} tokens > {extra['n_ctx']} maximum"
            return {"type": "error", "error": {"type": kind, "message": text, **extra}}
        if failure.code == TOO_LONG:
            kind = "exceed_context_size_error"  # llama-server's type, OpenAI's code.
        # As in llama-server, the default of `code` is the status.
        code = failure.status if failure.code is None else failure.code
        fields = {"message": str(failure), "type": kind, "param": failure.param, "code": code}
        return {"error": fields | failure.extra}


OPENAI, ANTHROPIC = Api(), Api(anthropic=True)


def as_refusal(error: BaseException) -> Refusal:
    """Convert an error to a Refusal. Messages of untyped errors are not sent, because such bugs may quote a
    client's text."""
    if isinstance(error, Refusal):
        return error
    text = str(error)
    if isinstance(error, PromptTooLong):
        sizes = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx}
        if error.argument:
            return Refusal(400, text, param=error.argument, code=TOO_LONG, extra=sizes)
        text = (
            f"the prompt of {error.n_tokens} tokens exceeds the available context size of {error.n_ctx}; "
            "shorten it, or start the server with a larger -c (0: the model's own)"
        )
        return Refusal(400, text, param="prompt", code=TOO_LONG, extra=sizes)
    if isinstance(error, InvalidArgument):
        return Refusal(400, text, param=error.argument or None)
    if isinstance(error, StateError):
        return Refusal(400, text)
    if isinstance(error, QueueFull):
        return Refusal(429, text, retry_s=1)
    if isinstance(error, DeadlineExceeded):
        return Refusal(504, text)
    if isinstance(error, UnsupportedModel | UnsupportedFeature):
        return Refusal(501, text)
    if isinstance(error, OutOfDeviceMemory):
        return Refusal(503, "a device is out of memory; retry with a smaller request or later", retry_s=5)
    if isinstance(error, DeviceLost | Timeout):
        return Refusal(503, "the model was lost and is being reopened; retry the request", retry_s=5)
    if isinstance(error, VkbackendError):
        return Refusal(503, "the model hangs and is being reopened; retry the request", retry_s=5)
    return Refusal(500, f"internal error ({type(error).__name__}); see the server's log")
