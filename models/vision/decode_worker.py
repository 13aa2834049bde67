"""Decodes pictures with Pillow under limits, for decode.py.

A request contains limits as JSON, then the file; the number in its head is the length of the limits. A reply
contains rows of RGB pixels; the number in its head is the width.
"""

from __future__ import annotations

import json
import os
from io import BytesIO
from typing import Any

from PIL import Image

from vkbackend.models.processes import worker
from vkbackend.models.processes.frames import ANSWERED, ASKED, ENDED, HEAD, MAX_ERROR, READY, REFUSED
from vkbackend.models.processes.memory_limits import PICTURE_MEMORY
from vkbackend.models.processes.worker import Refused, first_line, limit_cpu, receive, send, send_text

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ORIENTATION = 0x0112
# EXIF orientation -> the operation that turns the stored picture upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
OTHERS = (
    (b"%PDF-", "PDF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "Photoshop"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"%!PS", "PostScript"),
    (b"qoif", "QOI"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\3\4", "ZIP"),
    (b"\x1aE\xdf\xa3", "Matroska"),
)


def format_of(data: bytes) -> str:
    """Return the name of the file's format if it is a known format that is not decoded, else ""."""
    for magic, name in OTHERS:
        if data.startswith(magic):
            return name
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        return {b"avif": "AVIF", b"avis": "AVIF"}.get(brand, "HEIC" if brand[:2] in (b"he", b"mi") else "MP4")
    text = data[:1000].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<?xml", b"<svg", b"<!doctype svg", b"<!--")):
        return "SVG" if b"<svg" in text or b"svg" in text else "XML"
    return "HTML" if text.startswith((b"<!doctype html", b"<html")) else ""


def check_size(width: int, height: int, limits: dict[str, Any]) -> None:
    size = f"the picture has {width} x {height} pixels"
    if not width or not height:
        raise Refused(f"{size}; an empty picture cannot be used")
    if width * height > limits["n_pixels"]:
        raise Refused(f"{size}, at most {limits['n_pixels']} pixels are taken; make it smaller")
    if max(width, height) > limits["side"]:
        raise Refused(f"{size}, at most {limits['side']} on a side are taken; make it smaller")
    if max(width, height) > limits["aspect"] * min(width, height):
        raise Refused(f"{size}; the longer side may be at most {limits['aspect']} times the shorter")


def decoded(data: bytes, limits: dict[str, Any]) -> Image.Image:
    """Return the first frame, upright, in mode RGB."""
    if not data:
        raise Refused("the picture is empty: it has no bytes")
    taken = "PNG, JPEG, WebP, GIF and BMP are decoded"
    if name := format_of(data):
        raise Refused(f"the picture is {name}; {taken}")
    Image.MAX_IMAGE_PIXELS = limits["n_pixels"]
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        raise Refused(f"the picture has too many pixels, at most {limits['n_pixels']} are taken") from None
    except Image.UnidentifiedImageError:
        raise Refused(f"the file of {len(data)} bytes is not a picture that can be read; {taken}") from None
    except Exception as error:  # Plugins raise errors of many types, such as SyntaxError.
        raise Refused(f"the picture cannot be read: {first_line(error)}") from None
    check_size(*image.size, limits)
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(f"the {image.format} picture is damaged: {first_line(error)}") from None
    check_size(*image.size, limits)  # Frames of a GIF may be larger than its header says.
    return in_rgb(upright(image))


def upright(image: Image.Image) -> Image.Image:
    try:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # A picture without valid EXIF is usable.
        return image
    return image if turn is None else image.transpose(turn)


def in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; `convert` alone would clip at 255.
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


def main() -> None:
    worker.run(serve, PICTURE_MEMORY)


def serve() -> None:
    Image.init()  # Imports the plugins, which takes 40 ms.
    send(READY, b"")
    while True:
        n_bytes, n_asked, kind = HEAD.unpack(receive(HEAD.size))
        assert kind == ASKED
        data = receive(n_bytes)
        limits = json.loads(data[:n_asked])
        limit_cpu(limits["cpu_s"])
        try:
            image = decoded(bytes(data[n_asked:]), limits)
            send(ANSWERED, image.tobytes(), image.width)
        except Refused as error:
            send_text(REFUSED, str(error)[:MAX_ERROR])
        except MemoryError:
            send_text(ENDED, f"decoding the picture takes more than {PICTURE_MEMORY >> 20} MB of memory")
            os._exit(1)  # The state of the process is unknown.


if __name__ == "__main__":
    main()
