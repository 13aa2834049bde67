"""Limits of pictures that a caller passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a picture and of a request. A picture's header is checked before any pixel is decoded."""

    n_bytes: int = 20 << 20  # of the file
    n_pixels: int = 32_000_000
    side: int = 16_384  # pixels
    aspect: int = 200  # longer side / shorter side
    cpu_s: float = 10.0  # to decode it
    request_pixels: int = 128_000_000  # all pictures of a request together


IMAGE_LIMITS = ImageLimits()
