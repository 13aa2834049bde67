"""Images as callers give them: paths, bytes of a file, data URLs, pixels, and Pillow's images."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.data_url import base64_bytes, picture_bytes
from vkbackend.models.vision.limits import IMAGE_LIMITS
from vkbackend.paths import quoted, why

EXPECTED = "expected a path, the bytes of a file, a data URL, uint8 pixels [h, w, 3] or a Pillow image"
_URL = re.compile(r"data:|file:|[a-z][a-z0-9+.-]{1,31}://", re.IGNORECASE)


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """The bytes of an image's file, or pixels u8 [height, width, 3]. `digest` is a hash of these, in
    hexadecimal digits. `path` is the file's path, for errors, or empty."""

    data: bytes | np.ndarray
    digest: str
    path: str = ""

    @classmethod
    def of_bytes(cls, name: str, data: bytes, path: str = "") -> Image:
        """Raises InvalidArgument for an empty file, and for one that is too large."""
        most = IMAGE_LIMITS.n_bytes
        if not 0 < len(data) <= most:
            why = f"the image has {len(data)} bytes, expected 1 to {most} bytes ({most >> 20} MiB)"
            raise InvalidArgument(f"{path or name}: {why}", argument=name)
        return cls(data, hashlib.sha256(data).hexdigest()[:32], path)

    @classmethod
    def of_pixels(cls, pixels: np.ndarray) -> Image:
        pixels = np.ascontiguousarray(pixels)
        head = f"pixels {pixels.shape[0]} {pixels.shape[1]} ".encode()
        return cls(pixels, hashlib.sha256(head + pixels.tobytes()).hexdigest()[:32])

    def data_url(self) -> str:
        """Return the image as a URL in OpenAI's format. Pixels become PNG."""
        data = self.data
        if not isinstance(data, bytes):
            from PIL import Image as Pillow

            buffer = BytesIO()
            Pillow.fromarray(data).save(buffer, "PNG")
            data = buffer.getvalue()
        return f"data:{_type_of(data)};base64,{base64.b64encode(data).decode()}"


def _type_of(data: bytes) -> str:
    types = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
    return f"image/{next((name for magic, name in types.items() if data.startswith(magic)), 'png')}"


def image_of(name: str, value: Any) -> Image:
    """Raises InvalidArgument."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Image.of_bytes(name, bytes(value))
    if isinstance(value, str | os.PathLike):
        path = os.fsdecode(value)
        return (
            image_of_url(name, path) if isinstance(value, str) and _URL.match(path) else _of_file(name, path)
        )
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        from vkbackend.models.vision.decode_worker import in_rgb, upright

        value = np.asarray(in_rgb(upright(value)))
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise InvalidArgument(
                f"{name}: pixels {value.dtype} {list(value.shape)}, expected uint8 [height, width, 3]",
                argument=name,
            )
        return Image.of_pixels(value)
    raise refused(name, value, EXPECTED)


def image_of_url(name: str, url: Any) -> Image:
    """Return the image of a data URL. Raises InvalidArgument for other URLs, because nothing is fetched."""
    if not isinstance(url, str):
        raise refused(name, url, "expected a data URL such as data:image/png;base64,...")
    return _named(name, lambda: picture_bytes(url))


def image_of_base64(name: str, text: Any) -> Image:
    """Raises InvalidArgument for text that is not base64."""
    if not isinstance(text, str):
        raise refused(name, text, "expected an image's file in base64")
    return _named(name, lambda: base64_bytes(text))


def _named(name: str, read: Callable[[], bytes]) -> Image:
    try:
        data = read()
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}", argument=name) from None
    return Image.of_bytes(name, data)


def _of_file(name: str, path: str) -> Image:
    try:
        with Path(path).open("rb") as file:
            data = file.read(IMAGE_LIMITS.n_bytes + 1)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the image {quoted(path)} cannot be read: {why(error)}; give a file", argument=name
        ) from None
    return Image.of_bytes(name, data, path)


def image_of_part(name: str, part: Mapping[str, Any]) -> Image:
    """Return the image of a message's part in OpenAI's format, {"type": "image_url", "image_url": {"url":
    ...}}, or of {"type": "image", "image": X}, where X is anything that `image_of` accepts. Raises
    InvalidArgument."""
    if part.get("type") == "image":
        return image_of(f"{name}.image", part.get("image"))
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    return image_of_url(f"{name}.image_url.url", url)
