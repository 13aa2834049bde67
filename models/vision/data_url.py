"""Pictures inside `data:` URLs (RFC 2397), as OpenAI's API has them. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.limits import IMAGE_LIMITS, ImageLimits

TYPES = ("image/", "application/octet-stream")


def picture_bytes(url: str, limits: ImageLimits = IMAGE_LIMITS) -> bytes:
    """Return the decoded bytes of data:[type];base64,TEXT.

    The declared type must be an image type, or missing. The decoder determines the image format from the
    bytes. Raises InvalidArgument for another URL, another type, or text that is not base64 (RFC 4648, with
    padding, without line breaks).
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() != "data":
        shown = scheme[:20] if colon else url[:20]
        raise InvalidArgument(f"a data: URL is expected, and this begins with {shown!r}; nothing is fetched")
    head, comma, text = rest.partition(",")
    kind, *parameters = (part.strip().lower() for part in head[:200].split(";"))
    if not comma or "base64" not in parameters[-1:]:
        raise InvalidArgument("a data: URL must have the form data:image/png;base64,TEXT")
    if kind and not kind.startswith(TYPES):
        raise InvalidArgument(f"the data: URL has the type {kind[:50]!r}; an image is expected")
    return base64_bytes(text, limits)


def base64_bytes(text: str, limits: ImageLimits = IMAGE_LIMITS) -> bytes:
    """Return the bytes of a picture in base64. Raises InvalidArgument if the text is too long or not
    base64."""
    if len(text) > 4 * (limits.n_bytes // 3 + 1):
        raise InvalidArgument(
            f"the picture has about {len(text) * 3 // 4} bytes, at most {limits.n_bytes} are taken"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"the picture is not valid base64: {error}") from None
