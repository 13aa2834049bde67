"""Requests to a server with the demo model, in llama-server's and OpenAI's forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serving import Address

TEXT = "Once upon a time"
ASK = [{"role": "user", "content": "Tell a story."}]
NATIVE, OPENAI, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
LONG = "The old man told the children a story about a dog that could swim across the river. " * 3


@dataclass(frozen=True)
class Servers:
    plain: Address
    verbose: Address


def native(address: Address, **fields: Any) -> Any:
    return ask(address, NATIVE, {"prompt": TEXT, "n_predict": 4} | fields)


def openai(address: Address, **fields: Any) -> Any:
    return ask(address, OPENAI, {"prompt": TEXT, "max_tokens": 4} | fields)


def chat(address: Address, **fields: Any) -> Any:
    return ask(address, CHAT, {"messages": ASK, "max_tokens": 4} | fields)


def ask(address: Address, path: str, body: Any) -> Any:
    if body.get("stream"):
        return [event for event in address.events(path, body) if event != "[DONE]"]
    status, answer, _ = address.post(path, body)
    assert status == 200, answer
    return answer


def refused(address: Address, name: str, value: Any, path: str = NATIVE) -> dict[str, Any]:
    body = {"prompt": TEXT, "n_predict": 1} if path != CHAT else {"messages": ASK, "max_tokens": 1}
    status, answer, _ = address.post(path, body | {name: value})
    assert status == 400 and answer["error"]["param"] == name, answer
    error: dict[str, Any] = answer["error"]
    return error


def settings(s: Servers, **fields: Any) -> Any:
    return native(s.plain, **fields)["generation_settings"]
