"""Converts messages from OpenAI's format to the format that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from vkbackend.checks import items, refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.chats.prompt import PromptMaker
from vkbackend.models.pictures import NO_VISION, check_count
from vkbackend.models.text.chat_template import Message
from vkbackend.models.text.markers import Markers
from vkbackend.models.text.protection import UNTRUSTED
from vkbackend.models.tool_calls.formats import GLM4
from vkbackend.models.vision.images import Image, image_of_part

MAX_MESSAGES = 10_000
WITH_IMAGES = ("user", "tool")
TOOLS = """\
You can call functions. To call one, answer with nothing but JSON of this form:
{{"name": "the function", "arguments": {{"an argument": "its value"}}}}
The functions:
{}"""


class MessageImages:
    """Collects the images of messages. `markers` represent the images in the texts."""

    def __init__(self, markers: Markers | None = None) -> None:
        self.markers = markers or Markers()
        self.by_key: dict[str, Image] = {}
        self.names: dict[str, str] = {}  # the message part of each image, for errors

    def marker(self, image: Image, name: str) -> str:
        self.by_key[image.digest] = image
        self.names[image.digest] = name
        return self.markers.of(image.digest)


def checked_messages(name: str, value: Any, images: MessageImages | None = None) -> list[dict[str, Any]]:
    """Return checked messages. Each message has a role, a content (text, parts or None) and any other keys.
    The content becomes a text, with a marker for each image. `images` collects the images, or is None if the
    model has no vision. Raises InvalidArgument."""
    given = items(name, value, "expected a list of messages such as {'role': 'user', 'content': 'Hello'}")
    messages = [_message(f"{name}[{i}]", message, images) for i, message in enumerate(given)]
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidArgument(f"{name}: {len(messages)} messages; give 1 to {MAX_MESSAGES}", argument=name)
    if images is not None:
        check_count(name, images.by_key)
    return messages


def _message(name: str, value: Any, images: MessageImages | None) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise refused(name, value, "expected a dict with a role and a content")
    message = {**value, "content": _content(f"{name}.content", value.get("content"), value["role"], images)}
    if value.get("tool_calls") is not None:
        calls = items(f"{name}.tool_calls", value["tool_calls"], "expected a list of calls")
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)
    return message


def _content(name: str, value: Any, role: str, images: MessageImages | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for i, part in enumerate(items(name, value, "expected a text or a list of parts")):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            raise refused(f"{name}[{i}].text", part.get("text"), "expected a string")
        if kind in ("image_url", "image"):
            texts.append(_image(f"{name}[{i}]", part, role, images))
            continue
        why = f"parts of type {kind!r} are not supported" if kind else "expected a part with a type"
        raise refused(f"{name}[{i}]", part, f"{why}; there are: text, image_url, image")
    return images.markers.joined(texts) if images else "\n".join(texts)


def _image(name: str, part: Mapping[str, Any], role: str, images: MessageImages | None) -> str:
    why = ""
    if images is None:
        why = NO_VISION
    elif role not in WITH_IMAGES:
        why = f"only messages of {' and '.join(WITH_IMAGES)} may have images, and not of {role!r}"
    if why or images is None:
        raise InvalidArgument(f"{name}.{part['type']}: {why}", argument=name)
    return images.marker(image_of_part(name, part), f"{name}.{part['type']}")


def _call(name: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(name, value, "expected {'id': ..., 'function': {'name': ..., 'arguments': ...}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments or "{}")
            arguments = parsed if isinstance(parsed, Mapping) else arguments
    elif not isinstance(arguments, Mapping):
        raise refused(f"{name}.function.arguments", arguments, "expected a JSON object, or its text")
    arguments = arguments if isinstance(arguments, str) else dict(arguments)
    return {**value, "type": "function", "function": {**function, "arguments": arguments}}


def for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], maker: PromptMaker
) -> list[Message]:
    """Return messages as the template reads them. Tool results get their function's name. Arguments become a
    dict or JSON text. If the template ignores tools, a text describes them."""
    rendered, names = list[Message](), dict[str, str]()
    for message in messages:
        copy = dict(message)
        for call in copy.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if copy["role"] == "tool" and "name" not in copy:
            copy["name"] = names.get(str(copy.get("tool_call_id")), "")
        if copy.get("tool_calls") and maker.text_arguments and not maker.tool_format.described:
            copy["tool_calls"] = [_with_text(call) for call in copy["tool_calls"]]
        rendered.append(copy)
    if maker.tool_format.described:
        return _described(rendered, tools)
    if maker.tool_format is GLM4:
        return _with_metadata(rendered, tools, maker.source)
    if tools and "['tools']" in maker.source and "'tools' in message" in maker.source:
        return _in_system_prompt(rendered, {"tools": json.dumps([tool["function"] for tool in tools])})
    return rendered


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_metadata(messages: list[Message], tools: Sequence[Mapping[str, Any]], source: str) -> list[Message]:
    """Return messages for GLM-4. The metadata of a message is the function that the message calls."""
    out: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            out.append({**message, "role": "observation"})
        elif calls := message.get("tool_calls"):
            if message["content"]:
                out.append({"role": "assistant", "content": message["content"]})
            for call in calls:
                function = _with_text(call)["function"]
                out.append(
                    {"role": "assistant", "metadata": function["name"], "content": function["arguments"]}
                )
        else:
            out.append(message)
    if tools and "['tools']" in source:
        return _in_system_prompt(out, {"tools": list(tools)})
    return out


def _described(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"{message.get('name') or 'The function'} returned:\n{message['content']}"
            out.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            lines = [message["content"]] if message["content"] else []
            for call in calls:
                function = call["function"]
                written = function["arguments"]
                lines.append(json.dumps({"name": function["name"], "arguments": written}, ensure_ascii=False))
            out.append({"role": "assistant", "content": "\n".join(lines)})
        else:
            out.append(message)
    if not tools:
        return out
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return _in_system_prompt(out, {}, TOOLS.format("\n".join(lines)))


def _in_system_prompt(messages: list[Message], fields: Mapping[str, Any], text: str = "") -> list[Message]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first, rest = dict(messages[0]), messages[1:]
    else:
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(part for part in (first["content"], text) if part)
    return [{**first, "content": content, **fields, UNTRUSTED: True}, *rest]
