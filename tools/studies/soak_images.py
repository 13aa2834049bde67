"""Valid and invalid requests with images for serving_soak, in the forms of all APIs."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vkbackend.tools.demo.shapes import new_picture

N_IMAGES = 24
FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP"
SIZES = (48, 48), (48, 48), (96, 64), (31, 57), (200, 150)
QUESTIONS = (
    "Describe the picture.",
    "What is in the picture?",
    "a red",
    "and",
    "a blue circle in the top left.",
)
MARK = "<__media__>"
BAD_URLS: tuple[Any, ...] = (
    "data:image/png;base64,!!!!", "data:image/png;base64,AAAA", "data:text/html;base64,PGh0bWw+", "data:,",
    "http://127.0.0.1/a.png", "file:///etc/passwd", "", None, 3, ["x"], {"url": "x"},
)  # fmt: skip


def files_of_images(n: int = N_IMAGES) -> list[bytes]:
    """Return files of drawn pictures. Pictures come in pairs of equal size, which differ in a single
    pixel."""
    files = []
    for i in range(n):
        pixels, _ = new_picture(i // 2)
        if i % 2:
            pixels = pixels.copy()
            pixels[i % 48, i // 2 % 48] ^= 0x80
        file = BytesIO()
        Image.fromarray(pixels).resize(SIZES[i // 2 % len(SIZES)]).save(file, FORMATS[i // 2 % len(FORMATS)])
        files.append(file.getvalue())
    return files


def url_of(file: bytes) -> str:
    return "data:;base64," + b64encode(file).decode()


def parts_of(rng: random.Random, files: Sequence[bytes]) -> list[bytes | str]:
    """Return 1 to 3 images between texts. Some of the images are equal."""
    parts: list[bytes | str] = []
    for _ in range(rng.randrange(1, 4)):
        parts += [rng.choice(files), rng.choice(QUESTIONS)]
    return parts[:: rng.choice((1, 1, -1))]


def prompt_of(parts: Sequence[bytes | str]) -> dict[str, Any]:
    """Return the prompt of a completion, as `LLM.generate` takes it. A body contains base64."""
    text = " ".join(MARK if isinstance(part, bytes) else part for part in parts)
    return {"prompt_string": text, "multimodal_data": [part for part in parts if isinstance(part, bytes)]}


def completion(parts: Sequence[bytes | str]) -> tuple[str, dict[str, Any]]:
    prompt = prompt_of(parts)
    data = [b64encode(file).decode() for file in prompt["multimodal_data"]]
    return "/completions", {"prompt": prompt | {"multimodal_data": data}}


def content_of(parts: Sequence[bytes | str]) -> list[dict[str, Any]]:
    """Return the parts of an OpenAI message, as `LLM.chat` takes them."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image_url", "image_url": {"url": url_of(part)}} for part in parts
    ]  # fmt: skip


def chat_body(path: str, parts: Sequence[bytes | str], n: int) -> dict[str, Any]:
    """Return a request's body for a chat API, with one message and at most `n` answer tokens."""
    if path == "/chat/completions":
        return {"messages": [{"role": "user", "content": content_of(parts)}], "max_tokens": n}
    if path == "/responses":
        content: list[dict[str, Any]] = [
            {"type": "input_text", "text": part} if isinstance(part, str) else
            {"type": "input_image", "image_url": url_of(part)} for part in parts
        ]  # fmt: skip
        return {"input": [{"role": "user", "content": content}], "max_output_tokens": n}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                     "data": b64encode(part).decode()}} for part in parts
    ]  # fmt: skip
    return {"messages": [{"role": "user", "content": content}], "max_tokens": n}


def bad_image(rng: random.Random, files: Sequence[bytes]) -> tuple[str, dict[str, Any]]:
    file = rng.choice(files)
    cut = file[: rng.randrange(len(file) // 2)]
    wide = BytesIO()
    Image.fromarray(np.zeros((1, 300, 3), np.uint8)).save(wide, "PNG")
    url = rng.choice((*BAD_URLS, url_of(cut), url_of(wide.getvalue())))
    kind = rng.randrange(4)
    if kind == 0:
        data = rng.choice(([url], [b64encode(cut).decode()], [3], "x"))
        return "/completions", {"prompt": {"prompt_string": f"{MARK} a", "multimodal_data": data}}
    part = {"type": "image_url", "image_url": {"url": url}}
    if kind == 1:
        part = {"type": "image_url", "image_url": {"url": url_of(file)}}
        return "/chat/completions", {"messages": [{"role": "user", "content": [part] * 17}]}
    if kind == 2:
        source = {"type": "base64", "media_type": "image/png", "data": url}
        content = [{"type": "image", "source": source}]
        return "/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return "/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
