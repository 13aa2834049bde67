"""Images as callers give them: paths, bytes of a file, data URLs, pixels, and Pillow's images."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument

MAX_NBYTES = 20 << 20  # of an image's file
EXPECTED = "expected a path, the bytes of a file, a data URL, uint8 pixels [h, w, 3] or a Pillow image"
_DATA_URL = re.compile(r"data:[^,;]{0,255}(?:;[^,;]{0,255}){0,8};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{1,31}://|file:", re.IGNORECASE)


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """The bytes of an image's file, or pixels u8 [height, width, 3]. `digest` is a hash of these, in
    hexadecimal digits."""

    data: bytes | np.ndarray
    digest: str

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Image:
        """Raises InvalidArgument for more than MAX_NBYTES bytes, or none."""
        if not 0 < len(data) <= MAX_NBYTES:
            raise InvalidArgument(
                f"{name}: the image has {len(data)} bytes, expected 1 to {MAX_NBYTES >> 20} MiB",
                argument=name,
            )
        return cls(data, hashlib.sha256(data).hexdigest()[:32])

    @classmethod
    def of_pixels(cls, pixels: np.ndarray) -> Image:
        pixels = np.ascontiguousarray(pixels)
        head = f"pixels {pixels.shape[0]} {pixels.shape[1]} ".encode()
        return cls(pixels, hashlib.sha256(head + pixels.tobytes()).hexdigest()[:32])


def image_of(name: str, value: Any) -> Image:
    """Raises InvalidArgument."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Image.of_bytes(name, bytes(value))
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and (text[:5].lower() == "data:" or _SCHEME.match(text)):
            return image_of_url(name, text)
        return _of_file(name, os.fsdecode(text))
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise InvalidArgument(
                f"{name}: pixels {value.dtype} {list(value.shape)}, expected uint8 [height, width, 3]",
                argument=name,
            )
        return Image.of_pixels(value)
    raise refused(name, value, EXPECTED)


def image_of_url(name: str, url: Any) -> Image:
    """Return the image of a data URL. The type that the URL states is ignored. Raises InvalidArgument for
    other URLs: nothing is fetched."""
    if not isinstance(url, str):
        raise refused(name, url, "expected a data URL such as data:image/png;base64,...")
    head = _DATA_URL.match(url[:2500])
    if head is None:
        scheme = url.partition(":")[0][:32]
        why = "it needs the form data:image/png;base64,..." if scheme.lower() == "data" else (
            "URLs are not fetched; send the image as a data URL (data:image/png;base64,...)"
        )  # fmt: skip
        raise InvalidArgument(f"{name}={url[:60]!r}: {why}", argument=name)
    return image_of_base64(name, url[head.end() :])


def image_of_base64(name: str, text: Any) -> Image:
    """Raises InvalidArgument for text that is not base64 (RFC 4648, section 4)."""
    if not isinstance(text, str):
        raise refused(name, text, "expected an image's file in base64")
    if len(text) > 4 * (MAX_NBYTES // 3 + 1):
        raise InvalidArgument(
            f"{name}: the image has {len(text) * 3 // 4} bytes, expected at most {MAX_NBYTES >> 20} MiB",
            argument=name,
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{name}: the image is not valid base64", argument=name) from None
    return Image.of_bytes(name, data)


def _of_file(name: str, path: str) -> Image:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{name}: the image {path!r} cannot be read: {error}; give a file", argument=name
        ) from None
    return Image.of_bytes(f"{name} {path!r}", data)


def image_of_part(name: str, part: Mapping[str, Any]) -> Image:
    """Return the image of a message's part in OpenAI's format, {"type": "image_url", "image_url": {"url":
    ...}}, or of {"type": "image", "image": X}, where X is anything that `image_of` accepts. Raises
    InvalidArgument."""
    if part.get("type") == "image":
        return image_of(f"{name}.image", part.get("image"))
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    return image_of_url(f"{name}.image_url.url", url)
