"""Pictures as files of every format and mode that are decoded."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB"),
}
KINDS = [(name, mode) for name, modes in MODES.items() for mode in modes]


def smooth(height: int, width: int, seed: int = 1) -> np.ndarray:
    """Return pixels u8 [height, width, 3] of colours that change slowly, with noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = rng.uniform(0.02, 0.3, (3, 2))
    phases = rng.uniform(0, 6, 3)
    planes = [127 + 90 * np.sin(a * y + b * x + p) for (a, b), p in zip(waves, phases, strict=True)]
    return (np.stack(planes, -1) + rng.integers(-30, 30, (height, width, 3))).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image, name: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def picture(mode: str, height: int = 13, width: int = 17, seed: int = 1) -> Image.Image:
    pixels = smooth(height, width, seed)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    image = Image.fromarray(pixels)
    if "A" in mode:
        image.putalpha(Image.fromarray(pixels[..., 1]))
    return image.convert(mode)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG whose header contains this size, followed by these chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def blocks(height: int, width: int, seed: int) -> np.ndarray:
    """Return pixels u8 [height, width, 3] of blocks with noise. They are computed with integers only, so they
    are equal on every machine."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 192, (height // 8 + 1, width // 8 + 1, 3))
    fine = rng.integers(0, 64, (height, width, 3))
    return (coarse.repeat(8, 0).repeat(8, 1)[:height, :width] + fine).astype(np.uint8)
