"""Images in the messages of requests. A request contains the files of its images. With --allowed-media-host,
the server also fetches files from named hosts (media_fetch.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.images import Image
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.media_fetch import fetch, is_remote

BODY_NBYTES = 32 << 20  # the limit of a body in bytes, if the model reads images


def check_parts(name: str, content: Any) -> Any:
    """Refuse parts that name files of this machine."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and part.get("type") == "image":
            raise refused(f"{name}[{i}].type", "image", 'expected "image_url" with a data URL')
    return content


async def with_fetched(config: Config, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the files of URLs of allowed hosts. Raises InvalidArgument."""
    parts = list(_image_parts(messages))
    if len(parts) > config.limits.images:
        raise InvalidArgument(
            f"messages: {len(parts)} images, at most {config.limits.images} are allowed", argument="messages"
        )
    for name, part in parts:
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, Mapping) else value
        if config.media_hosts and is_remote(url):
            data = await asyncio.to_thread(fetch, f"{name}.url", str(url), config.media_hosts)
            part |= {"type": "image", "image": Image.of_bytes(name, data)}
    return messages


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in ("image_url", "image") for part in parts)


def _image_parts(messages: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield f"messages[{i}].content[{j}].image_url", part


# ---- the forms of other APIs ----


def of_anthropic(block: Fields) -> dict[str, Any]:
    """Return an `image` block as a part of OpenAI's chat. Raises InvalidArgument for a source that is not
    base64."""
    block.required("source")
    source = block.inner("source")
    assert source is not None
    if (kind := source.text("type", "")) == "url":
        return {"type": "image_url", "image_url": {"url": source.text("url", "")}}
    if kind != "base64":
        raise refused(source.name("type"), kind, "files are not stored; expected base64")
    source.required("data")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{source.text('data', '')}"}}


def of_responses(part: Fields) -> dict[str, Any]:
    """Return an `input_image` as a part of OpenAI's chat. Raises InvalidArgument."""
    part.refuse("file_id", why="files are not stored; send a data URL as image_url")
    part.required("image_url")
    return {"type": "image_url", "image_url": {"url": part.get("image_url")}}


def merged(texts: list[str | dict[str, Any]], between: str) -> str | list[dict[str, Any]]:
    """Return a message's content: a text if there is no image, else parts. `between` joins consecutive
    texts."""
    parts: list[str | dict[str, Any]] = []
    for text in texts:
        if isinstance(text, str) and parts and isinstance(before := parts[-1], str):
            parts[-1] = before + between + text
        else:
            parts.append(text)
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
